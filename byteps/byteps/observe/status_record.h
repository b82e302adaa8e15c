#ifndef BYTEPS_OBSERVE_STATUS_RECORD_H_
#define BYTEPS_OBSERVE_STATUS_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/net/link/counters.h"

namespace byteps {
namespace core {

// Worker for which others have waited.
struct LateWorker {
  uint32_t rank = 0;
  uint64_t sums = 0;     // number of sums in which it pushed last
  uint64_t wait_ns = 0;  // time from the first push to its own, total of these sums
};

// Report of a worker or server to the scheduler, with each heartbeat. Counts are since the
// process's start. `clock_ns`: its steady clock, from which rates are computed.
struct StatusRecord {
  static constexpr uint8_t kVersion = 2;
  static constexpr size_t kMaxLate = 4;
  static constexpr size_t kMaxNics = 8;
  static constexpr size_t kMaxNic = 15;       // limit of a name's bytes, as in the kernel
  static constexpr size_t kMaxHost = 64;      // bytes; longer names are cut
  static constexpr size_t kMaxProblem = 300;  // bytes

  Role role = Role::kWorker;
  uint32_t pid = 0;
  std::string host;  // the machine's own host name
  uint64_t clock_ns = 0;
  uint64_t sent_bytes = 0;      // bytes of values: a worker's pushes, a server's sums
  uint64_t received_bytes = 0;  // bytes of values
  uint64_t finished = 0;        // number of a worker's operations, or of a server's sums
  uint64_t failed = 0;
  uint64_t running = 0;  // number of operations, or of sums that only some workers have pushed
  uint64_t tensors = 0;  // number of declared tensors
  uint64_t keys = 0;     // number of a server's partitions
  // Number of a worker's unsent partitions, or of a server's pushes that are not added yet.
  uint64_t queued = 0;
  uint64_t busy_ns = 0;         // on a server: time that its threads have spent adding
  uint64_t problems = 0;        // number of warnings and errors in its log
  int64_t problem_unix_ms = 0;  // time of the latest problem
  std::string problem;          // text of the latest problem
  uint64_t sums_since = 0;      // on a server: number of sums completed since the previous record
  // On a server: workers that were late in those sums, the worst first.
  std::vector<LateWorker> late;
  std::vector<ps::NicReading> nics;

  // Returns at most ps::kMaxReport bytes.
  std::string Pack() const;
  // Returns false if `bytes` are not a record of this version; `record` is then undefined.
  static bool Parse(const std::string& bytes, StatusRecord* record);
};

// Sets the fields that all processes have: pid, host, clock, NICs, and the log's last problem.
void DescribeProcess(StatusRecord* record);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_STATUS_RECORD_H_
