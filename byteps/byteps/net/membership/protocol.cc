#include "byteps/net/membership/protocol.h"

#include <algorithm>
#include <cstdio>

namespace ps {
namespace membership {

std::string PackLink(int mbps) { return "link=" + std::to_string(mbps); }

int ParseLink(const std::string& text) {
  int mbps = 0;
  sscanf(text.c_str(), "link=%9d", &mbps);
  return std::max(mbps, 0);
}

}  // namespace membership
}  // namespace ps
