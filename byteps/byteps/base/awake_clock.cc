#include "byteps/base/awake_clock.h"

#include "byteps/base/stall_watch.h"

namespace ps {

AwakeClock::time_point AwakeClock::now() {
  return StallWatch::Get()->AwakeAt(std::chrono::steady_clock::now());
}

}  // namespace ps
