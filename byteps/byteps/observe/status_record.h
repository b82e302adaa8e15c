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

// What a worker or a server tells the scheduler about itself, with each heartbeat.
//
// A worker that others waited for.
struct LateWorker {
  uint32_t rank = 0;
  uint64_t sums = 0;     // of which it was the last to push
  uint64_t wait_ns = 0;  // from the first push to its, over all of these sums
};

// Counts are since the start of the process; `clock_ns` is the process's steady clock, to make
// rates of two records.
struct StatusRecord {
  static constexpr uint8_t kVersion = 2;
  static constexpr size_t kMaxLate = 4;
  static constexpr size_t kMaxNics = 8;
  static constexpr size_t kMaxNic = 15;       // bytes of a name, as the kernel has it
  static constexpr size_t kMaxHost = 64;      // bytes; what is longer is cut
  static constexpr size_t kMaxProblem = 300;  // bytes

  Role role = Role::kWorker;
  uint32_t pid = 0;
  std::string host;  // as the machine calls itself
  uint64_t clock_ns = 0;
  uint64_t sent_bytes = 0;      // values: of a worker pushes, of a server sums
  uint64_t received_bytes = 0;  // values
  uint64_t finished = 0;        // of a worker operations, of a server sums
  uint64_t failed = 0;
  uint64_t running = 0;   // operations, or sums that some have pushed and others have not
  uint64_t tensors = 0;   // declared
  uint64_t keys = 0;      // of a server: partitions that it sums
  uint64_t queued = 0;    // of a worker partitions not sent yet, of a server pushes not added yet
  uint64_t busy_ns = 0;   // of a server: time that its threads spent adding
  uint64_t problems = 0;  // warnings and errors in its log
  int64_t problem_unix_ms = 0;   // when the last of them was
  std::string problem;           // what it said
  uint64_t sums_since = 0;       // of a server: complete since the record before
  std::vector<LateWorker> late;  // of a server: of those sums, the worst first
  std::vector<ps::NicReading> nics;

  // At most ps::kMaxReport bytes.
  std::string Pack() const;
  // False when `bytes` are no record of this version; `record` is then undefined.
  static bool Parse(const std::string& bytes, StatusRecord* record);
};

// Fills in what is true of any process: pid, host, clock, NICs, the log's last problem.
void DescribeProcess(StatusRecord* record);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_OBSERVE_STATUS_RECORD_H_
