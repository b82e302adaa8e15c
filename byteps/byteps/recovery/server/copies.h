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

// What became of the gradients of a round: the last one that was complete.
struct UpdatedRound {
  uint32_t number = 0;
  std::unique_ptr<RoundUpdate> update;
  SharedBytes sum;            // the gradients, or what was made of them
  std::vector<bool> excused;  // members that it lacks
};

// Copies of the state that another server keeps for an optimizer, and of its last rounds.
//
// A copy follows its original by the same arithmetic: it is told the gradients that were summed,
// and the step that was made of them, and makes it too.  So it has the same bits, for the bytes of
// the gradients alone.
//
// The copy of one partition.
struct StateCopy {
  std::shared_ptr<const Declaration> declaration;
  uint64_t index = 0;
  std::unique_ptr<PartitionState> state;
  std::optional<UpdatedRound> last;
};

// A round that is complete, wherever it is kept.
struct LastRound {
  uint32_t number = 0;
  const RoundUpdate* update = nullptr;  // null: there was none
  SharedBytes sum;
  std::vector<bool> excused;
};

// The record by which a backup is told all of a partition, and its values.
CopyRecord RecordOfAll(const Declaration& declaration, const PartitionState& state,
                       const LastRound& last, SharedBytes* values);

// Any thread may call anything; what is of one key, one thread at a time.
class Copies {
 public:
  // Grows with each Clear.
  uint64_t generation();
  // Makes what a record says, of the partition of this key.  Why it cannot be, or "".  Nothing
  // comes of one that belongs to an earlier generation.  Throws OutOfMemory.
  std::string Apply(uint64_t key, const CopyRecord& record, SharedBytes values,
                    uint64_t generation);
  std::vector<uint64_t> Keys();
  // Throws std::runtime_error where there is no copy of that key, or no more.
  bool Has(uint64_t key) { return Find(key) != nullptr; }
  CopyRecord RecordOf(uint64_t key, SharedBytes* values);
  // Takes it out; null: there is none.
  std::shared_ptr<StateCopy> Take(uint64_t key);
  void Clear();

 private:
  std::string Load(StateCopy* copy, const CopyRecord& record, const SharedBytes& values);
  std::string Settle(StateCopy* copy, const CopyRecord& record);
  std::string Add(StateCopy* copy, const CopyRecord& record, SharedBytes values);
  std::shared_ptr<StateCopy> Find(uint64_t key);
  // The copy that a record of a state is of, made where there is none.
  std::shared_ptr<StateCopy> FindOrMake(uint64_t key, const CopyRecord& record, uint64_t generation,
                                        std::string* error);

  ServerCounters uncounted_;  // of the originals they are counted
  ps::Mutex mu_;
  uint64_t generation_ PS_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, std::shared_ptr<StateCopy>> copies_ PS_GUARDED_BY(mu_);  // by key
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_COPIES_H_
