// Random numbers that name a process, among all that have ever been in its place, and a job.  That
// of a process is carried in Node::endpoint_name.
#ifndef BYTEPS_NET_LINK_NODE_TOKEN_H_
#define BYTEPS_NET_LINK_NODE_TOKEN_H_

#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "byteps/base/error.h"
#include "ps/internal/message.h"

namespace ps {

inline uint64_t NewToken() {
  // From the kernel: the C++ library's source of random numbers needs a newer C library than
  // the rest of us.
  uint64_t token = 0;
  while (token == 0) {
    if (getrandom(&token, sizeof(token), 0) != sizeof(token)) ThrowErrno("getrandom");
  }
  return token;
}

// 0 if it has none.  Byte by byte, so that it means the same on every CPU.
inline uint64_t TokenOf(const Node& node) {
  uint64_t token = 0;
  if (node.endpoint_name_len != sizeof(token)) return 0;
  for (size_t i = 0; i < sizeof(token); ++i) {
    token |= static_cast<uint64_t>(static_cast<unsigned char>(node.endpoint_name[i])) << (8 * i);
  }
  return token;
}

inline void SetToken(uint64_t token, Node* node) {
  memset(node->endpoint_name, 0, sizeof(node->endpoint_name));
  for (size_t i = 0; i < sizeof(token); ++i) {
    node->endpoint_name[i] = static_cast<char>(token >> (8 * i) & 0xff);
  }
  node->endpoint_name_len = sizeof(token);
}

// The number of a job: a random one, and in its low bits the incarnation that the scheduler is at.
// Who connects and who listens say it to each other and prove it, so that a connection belongs to
// one incarnation of one job.
constexpr uint64_t kIncarnationMask = 0xffff;

inline uint64_t NewJob() {
  uint64_t job = 0;
  while (job == 0) job = NewToken() & ~kIncarnationMask;
  return job;
}

inline uint64_t WithIncarnation(uint64_t job, int incarnation) {
  return (job & ~kIncarnationMask) | (static_cast<uint64_t>(incarnation) & kIncarnationMask);
}

// Jobs count from 1.  A server says this to another one that connects before the scheduler has
// named it: try again.
constexpr int kNotTold = 0;

// Why who says `theirs` has nothing to say to who is of `ours`.
inline std::string NotOurs(uint64_t theirs, uint64_t ours) {
  if (((theirs ^ ours) & ~kIncarnationMask) != 0) return "it belongs to another job";
  return "it is of generation " + std::to_string(theirs & kIncarnationMask) +
         " of the job, and this node of generation " + std::to_string(ours & kIncarnationMask);
}

// Whether the node that says `theirs` is of an earlier incarnation of the same job than `ours`: the
// scheduler's word on the new one is still in flight to it.
inline bool IsBehind(uint64_t theirs, uint64_t ours) {
  const bool same_job = ((theirs ^ ours) & ~kIncarnationMask) == 0;
  return same_job && (theirs & kIncarnationMask) < (ours & kIncarnationMask);
}

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NODE_TOKEN_H_
