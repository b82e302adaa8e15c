#ifndef BYTEPS_SERVER_PARTITION_H_
#define BYTEPS_SERVER_PARTITION_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"
#include "byteps/server/declared_tensor.h"
#include "byteps/server/optimizer/partition_state.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {

// What goes on once the backup has what it was told (backup_link.h).
struct Copying {
  enum Kind { kRound, kStep, kVerdict, kLoad, kAll } kind = kRound;
  uint64_t number = 0;   // of the request to the backup
  uint32_t round = 0;    // kRound
  Message request;       // kStep, kVerdict and kLoad: of a member
  int64_t received = 0;  // when that came
};

struct Partition : std::enable_shared_from_this<Partition> {
  std::shared_ptr<const DeclaredTensor> tensor;
  uint64_t key = 0;
  uint64_t index = 0;
  size_t thread = 0;  // number of the SumThread that it belongs to, whose lock guards what follows
  std::unique_ptr<PartitionState> state;  // null of a tensor that is summed, and no more
  std::vector<uint16_t> lost;             // by rounding the last sum, of blocks with feedback
  // By member index: it has pushed a round of this since its replica came.  Empty: nobody has.
  std::vector<bool> came;
  // Of a state of which another server has a copy.  What waits for the backup, and what came
  // meanwhile, with the time; the pass with which the backup knows the state; the last round that
  // was complete and that nobody here needs.
  std::optional<Copying> copying;
  std::deque<std::pair<Message, int64_t>> held;
  uint64_t pass = 0;
  std::optional<UpdatedRound> ended;
  std::shared_ptr<const Declaration> restored_declaration;  // of a state that was a copy
  bool has_state = false;                                   // is among those that have one

  bool is_freed = false;         // nobody holds its tensor: it goes, once `copying` is over
  std::vector<int> released_by;  // ranks, while `copying` is not over
  bool is_listed = false;        // among those of its thread
  uint32_t first_round = 0;
  std::deque<Round> rounds;
  // Why the last rounds before the first one failed, by number, for members that come later.
  std::map<uint32_t, std::string> failures;

  const Declaration& declaration() const { return tensor->declaration; }
  // Null: it is over, or has not begun.
  Round* Find(uint32_t number) {
    const uint32_t ahead = number - first_round;  // unsigned: one that is over is far ahead as well
    return ahead < rounds.size() ? &rounds[ahead] : nullptr;
  }
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_PARTITION_H_
