#ifndef BYTEPS_RECOVERY_SERVER_COPIES_H_
#define BYTEPS_RECOVERY_SERVER_COPIES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/observe/metrics.h"
#include "byteps/recovery/server/copy_record.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/optimizer/round_update.h"

namespace byteps {
namespace core {

// Last complete round of a partition, with the outcome of its update.
struct UpdatedRound {
  uint32_t number = 0;
  std::unique_ptr<RoundUpdate> update;
  SharedBytes sum;            // the gradients, or the result of the step
  std::vector<bool> excused;  // members missing in the sum
};

// Copies of another server's optimizer state, and of its last rounds.
//
// A copy repeats the arithmetic of its original: the backup gets the summed gradients and the step,
// and makes the step, too. So the copy has the same bits, at the cost of sending the gradients.
//
// StateCopy is the copy of one partition.
struct StateCopy {
  std::shared_ptr<const Declaration> declaration;
  uint64_t index = 0;
  std::unique_ptr<PartitionState> state;
  std::optional<UpdatedRound> last;
};

// Non-owning form of UpdatedRound.
struct LastRound {
  uint32_t number = 0;
  const RoundUpdate* update = nullptr;  // null: no round was complete
  SharedBytes sum;
  std::vector<bool> excused;
};

// Makes the record that copies a whole partition to a backup, and the record's values.
CopyRecord RecordOfAll(const Declaration& declaration, const PartitionState& state,
                       const LastRound& last, SharedBytes* values);

// Thread-safe, except that only one thread at a time may use a key.
class Copies {
 public:
  // Number that grows with each Clear.
  uint64_t resets();
  // Applies a record to the copy of this key. Returns an error or "". If Clear was called since
  // `resets` was read, does nothing. Throws OutOfMemory.
  std::string Apply(uint64_t key, const CopyRecord& record, SharedBytes values, uint64_t resets);
  std::vector<uint64_t> Keys();
  // RecordOf throws std::runtime_error if there is no copy of the key.
  bool Has(uint64_t key) { return Find(key) != nullptr; }
  CopyRecord RecordOf(uint64_t key, SharedBytes* values);
  // Removes and returns a copy; null if there is none.
  std::shared_ptr<StateCopy> Take(uint64_t key);
  void Clear();

 private:
  std::string Load(StateCopy* copy, const CopyRecord& record, const SharedBytes& values);
  std::string Settle(StateCopy* copy, const CopyRecord& record);
  std::string Add(StateCopy* copy, const CopyRecord& record, SharedBytes values);
  std::shared_ptr<StateCopy> Find(uint64_t key);
  // Returns the copy for a kState record. Makes it if there is none.
  std::shared_ptr<StateCopy> FindOrMake(uint64_t key, const CopyRecord& record, uint64_t resets,
                                        std::string* error);

  ServerCounters uncounted_;  // not exported: only originals are counted
  ps::Mutex mu_;
  uint64_t resets_ PS_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, std::shared_ptr<StateCopy>> copies_ PS_GUARDED_BY(mu_);  // by key
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_COPIES_H_
