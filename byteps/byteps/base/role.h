// What a process is in its job.
#ifndef BYTEPS_BASE_ROLE_H_
#define BYTEPS_BASE_ROLE_H_

namespace byteps {
namespace core {

enum class Role { kScheduler, kServer, kWorker };

inline const char* NameOf(Role role) {
  if (role == Role::kScheduler) return "scheduler";
  return role == Role::kServer ? "server" : "worker";
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_ROLE_H_
