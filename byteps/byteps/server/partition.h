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

// A partition of a tensor. Each partition is summed separately.
struct Partition : std::enable_shared_from_this<Partition> {
  std::shared_ptr<const DeclaredTensor> tensor;
  uint64_t key = 0;
  uint64_t index = 0;
  size_t thread = 0;  // number of its SumThread, whose lock guards all members below
  std::unique_ptr<PartitionState> state;  // null if the tensor has no rule
  std::vector<uint16_t> lost;  // rounding errors of the last sum, for blocks with feedback
  // Whether a loss policy holds the partition. No request is then served: the partition collects
  // requests with their time of arrival (SumThread::ServeHeld), and ranks that release the tensor
  // (Rounds::LetGo).
  bool is_held = false;
  std::deque<std::pair<Message, int64_t>> held;
  std::vector<int> released_by;
  // Whether the tensor was freed, so that the partition is freed when it is not held.
  bool is_freed = false;
  bool is_listed = false;  // the partition is in Rounds::partitions
  uint32_t first_round = 0;
  std::deque<Round> rounds;
  // Errors of the last failed rounds, by number, for members that push these rounds later.
  std::map<uint32_t, std::string> failures;
  std::unique_ptr<LossNotes> notes;

  const Declaration& declaration() const { return tensor->declaration; }
  // Returns the round, or null if the round is over or has not begun.
  Round* Find(uint32_t number) {
    // The difference is unsigned, so finished rounds are far ahead, too.
    const uint32_t ahead = number - first_round;
    return ahead < rounds.size() ? &rounds[ahead] : nullptr;
  }
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_PARTITION_H_
