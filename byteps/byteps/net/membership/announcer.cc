#include "byteps/net/membership/announcer.h"

#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/net/membership/event.h"

namespace ps {

Announcer::Announcer(Listener listener) : listener_(std::move(listener)) {}

void Announcer::Tell(const MembershipEvent& event) {
  const bool is_end = (event.kind == MembershipEvent::kFailed && event.next_generation == 0) ||
                      (event.kind == MembershipEvent::kEnded && !event.suspended);
  BPS_INVARIANT_NOTED("a job ends once", !is_end || !over_.exchange(true), event.reason);
  if (listener_) listener_(event);
}

void Announcer::TellFailure(const std::string& reason, int next_generation, const char* file,
                            int line) {
  MembershipEvent event;
  event.kind = MembershipEvent::kFailed;
  event.next_generation = next_generation;
  event.reason = reason;
  event.file = file;
  event.line = line;
  Tell(event);
}

}  // namespace ps
