#include "byteps/engine/server_loss.h"

#include <algorithm>

namespace byteps {
namespace core {

int ServerLoss::ServerOf(uint64_t turn) const {
  const auto found = std::find(turns.begin(), turns.end(), turn);
  return turn == 0 || found == turns.end() ? -1 : static_cast<int>(found - turns.begin());
}

}  // namespace core
}  // namespace byteps
