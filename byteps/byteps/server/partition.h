#ifndef BYTEPS_SERVER_PARTITION_H_
#define BYTEPS_SERVER_PARTITION_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
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

// The part of a tensor that is summed by itself.
struct Partition : std::enable_shared_from_this<Partition> {
  std::shared_ptr<const DeclaredTensor> tensor;
  uint64_t key = 0;
  uint64_t index = 0;
  size_t thread = 0;  // number of the SumThread that it belongs to, whose lock guards what follows
  std::unique_ptr<PartitionState> state;  // null of a tensor that is summed, and no more
  std::vector<uint16_t> lost;             // by rounding the last sum, of blocks with feedback
  // It serves no request until Rounds::LetGo; what came meanwhile, with the time: requests, and
  // ranks that have released its tensor.
  bool is_held = false;
  std::deque<std::pair<Message, int64_t>> held;
  std::vector<int> released_by;
  bool is_freed = false;   // nobody holds its tensor: it goes, once it is not held
  bool is_listed = false;  // among those of its thread
  uint32_t first_round = 0;
  std::deque<Round> rounds;
  // Why the last rounds before the first one failed, by number, for members that come later.
  std::map<uint32_t, std::string> failures;
  std::unique_ptr<LossNotes> notes;

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
