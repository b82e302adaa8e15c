// Any bytes as what follows a TCP connection's greeting: a frame's header, and its meta.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "byteps/net/link/meta_codec.h"
#include "byteps/net/tcp/wire.h"
#include "demand.h"
#include "ps/base.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const char* bytes = reinterpret_cast<const char*>(data);
  while (size >= ps::tcp::kFrameHeaderBytes) {
    ps::tcp::FrameHeader header;
    if (!ps::tcp::DecodeFrameHeader(bytes, &header)) return 0;
    DEMAND(header.values <= ps::tcp::kMaxValues && header.meta_bytes <= ps::kMaxMetaBytes);
    bytes += ps::tcp::kFrameHeaderBytes;
    size -= ps::tcp::kFrameHeaderBytes;
    const size_t meta_bytes = std::min<size_t>(header.meta_bytes, size);
    // A copy, so that a read beyond its end is seen.
    const std::vector<char> copy(bytes, bytes + meta_bytes);
    ps::Meta meta;
    if (!ps::DecodeMeta(copy.data(), copy.size(), &meta)) return 0;
    bytes += meta_bytes;
    size -= meta_bytes;
  }
  return 0;
}
