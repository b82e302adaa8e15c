// Any bytes as the meta of a message: refused, or the very bytes that it would be sent as.
#include <cstdint>
#include <string>

#include "byteps/net/link/meta_codec.h"
#include "demand.h"
#include "ps/base.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const char* const bytes = reinterpret_cast<const char*>(data);
  ps::Meta meta;
  if (!ps::DecodeMeta(bytes, size, &meta)) return 0;
  DEMAND(!meta.DebugString().empty());  // as the log does
  DEMAND(ps::EncodeMeta(meta) == std::string(bytes, size));
  return 0;
}
