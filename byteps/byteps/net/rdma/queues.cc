#include "byteps/net/rdma/queues.h"

#include <cstdio>
#include <string>

#include "byteps/base/invariant.h"

namespace ps {
namespace rdma {

bool Overlap(const char* a, uint64_t a_bytes, const char* b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

bool Place::Overlaps(const char* other, uint64_t other_bytes) const {
  return begin != nullptr && Overlap(begin, bytes, other, other_bytes);
}

std::string Outgoing::Describe() const {
  char text[80];
  snprintf(text, sizeof(text), "the message of key 0x%llx, %llu bytes",
           static_cast<unsigned long long>(key), static_cast<unsigned long long>(bytes()));
  return text;
}

}  // namespace rdma
}  // namespace ps
