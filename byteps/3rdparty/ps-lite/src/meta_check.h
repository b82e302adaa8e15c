// Whether the packed meta of a message may be unpacked: it comes from the network.
#ifndef PS_META_CHECK_H_
#define PS_META_CHECK_H_

#include <cstdint>
#include <cstring>

#include "./meta.h"

namespace ps {

// Whether `size` bytes at `data` hold all that their own counts promise.
inline bool MetaIsWhole(const char* data, size_t size) {
  if (size < sizeof(RawMeta)) return false;
  RawMeta raw;
  memcpy(&raw, data, sizeof(raw));
  if (raw.body_size < 0 || raw.data_type_size < 0 || raw.control.node_size < 0) return false;
  const uint64_t need = sizeof(RawMeta) + static_cast<uint64_t>(raw.body_size) +
                        static_cast<uint64_t>(raw.data_type_size) * sizeof(int) +
                        static_cast<uint64_t>(raw.control.node_size) * sizeof(RawNode);
  return need <= size;
}

}  // namespace ps
#endif  // PS_META_CHECK_H_
