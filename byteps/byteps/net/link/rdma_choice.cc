#include "byteps/net/link/rdma_choice.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "byteps/base/invariant.h"

namespace ps {

using byteps::core::UsageError;

namespace {

// Greatest port and GID index: the verbs interface has a byte for each.
constexpr int kMost = 255;
constexpr size_t kDigits = 3;

// Parses `text` into `number`, or sets it to `fallback` if `text` is "". Returns false if `text` is
// not a number from `low` to kMost.
bool Take(const std::string& text, int low, int fallback, int* number) {
  *number = fallback;
  if (text.empty()) return true;
  const bool digits =
      std::all_of(text.begin(), text.end(), [](char c) { return '0' <= c && c <= '9'; });
  if (!digits || text.size() > kDigits) return false;
  *number = std::stoi(text);
  return low <= *number && *number <= kMost;
}

}  // namespace

RdmaChoice RdmaChoice::Parse(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ':');) parts.push_back(part);
  const bool fits = parts.size() <= 3;
  parts.resize(3);
  RdmaChoice choice;
  choice.device = parts[0];
  if (fits && Take(parts[1], 1, 0, &choice.port) && Take(parts[2], 0, -1, &choice.gid_index)) {
    return choice;
  }
  throw UsageError("BYTEPS_RDMA_DEVICE='" + text +
                   "' is not NAME[:PORT[:GID]], with a port from 1 to 255 and a GID from 0 to 255: "
                   "mlx5_0, mlx5_0:1, mlx5_0:1:3, or ::3 for that GID of the address's device");
}

}  // namespace ps
