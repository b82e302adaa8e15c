#include "byteps/net/tcp/frames.h"

#include <algorithm>
#include <string>

#include "byteps/base/invariant.h"
#include "byteps/base/wire.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/tcp/socket.h"
#include "byteps/net/tcp/stream.h"

namespace ps {
namespace tcp {

OutgoingPtr MakeMessage(const Message& msg) {
  const std::string meta = EncodeMeta(msg.meta);
  auto outgoing = std::make_shared<Outgoing>();
  FrameHeader header;
  header.values = static_cast<uint8_t>(msg.data.size());
  header.meta_bytes = static_cast<uint32_t>(meta.size());
  outgoing->head.reserve(kFrameHeaderBytes + 8 * msg.data.size() + meta.size());
  ByteWriter head(&outgoing->head);
  head.Bytes(header.Encode());
  for (const auto& value : msg.data) head.Int<uint64_t>(value.size());
  head.Bytes(meta);
  outgoing->values = msg.data;
  outgoing->bytes = outgoing->head.size();
  for (const auto& value : msg.data) outgoing->bytes += value.size();
  return outgoing;
}

OutgoingPtr MakeFrame(FrameType type) {
  auto outgoing = std::make_shared<Outgoing>();
  FrameHeader header;
  header.type = outgoing->type = type;
  outgoing->head = header.Encode();
  outgoing->bytes = outgoing->head.size();
  return outgoing;
}

size_t BytesOf(const OutgoingList& list) {
  size_t bytes = 0;
  for (const auto& outgoing : list) bytes += outgoing->bytes;
  return bytes;
}

std::vector<iovec> VectorOf(const OutgoingList& list, size_t done) {
  std::vector<iovec> vector;
  const auto add = [&](const char* data, size_t size) {
    const size_t skipped = std::min(done, size);
    done -= skipped;
    if (size > skipped) vector.push_back({const_cast<char*>(data) + skipped, size - skipped});
  };
  for (const auto& outgoing : list) {
    add(outgoing->head.data(), outgoing->head.size());
    for (const auto& value : outgoing->values) add(value.data(), value.size());
  }
  return vector;
}

}  // namespace tcp
}  // namespace ps
