#include "./wire.h"

#include <algorithm>

#include "../meta_codec.h"
#include "ps/wire_bytes.h"

namespace ps {
namespace tcp {

std::string Hello::Encode() const {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(kMagic);
  out.Int(kVersion);
  out.Int(index);
  out.Int(job);
  out.Int(sender);
  out.Int(receiver);
  out.Int(node_id);
  out.Int<uint32_t>(0);
  return bytes;
}

Hello DecodeHello(const char* data) {
  ByteReader in(data + kPreambleBytes, kHelloBytes - kPreambleBytes);
  Hello hello;
  in.Int(&hello.index);
  in.Int(&hello.job);
  in.Int(&hello.sender);
  in.Int(&hello.receiver);
  in.Int(&hello.node_id);
  return hello;
}

std::string HelloReply::Encode() const {
  const std::string reason = refusal.substr(0, kMaxRefusalBytes);
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(kMagic);
  out.Int(kVersion);
  out.Int<uint16_t>(reason.size());
  out.Int(job);
  out.Int(sender);
  out.Bytes(reason);
  return bytes;
}

HelloReply DecodeHelloReply(const char* data, size_t* refusal_bytes) {
  ByteReader in(data + kPreambleBytes, kHelloReplyBytes - kPreambleBytes);
  HelloReply reply;
  uint16_t bytes = 0;
  in.Int(&bytes);
  in.Int(&reply.job);
  in.Int(&reply.sender);
  *refusal_bytes = std::min<size_t>(bytes, kMaxRefusalBytes);
  return reply;
}

std::string Mismatch(const char* data) {
  ByteReader in(data, kPreambleBytes);
  uint32_t magic = 0;
  uint16_t version = 0;
  in.Int(&magic);
  in.Int(&version);
  if (magic != kMagic) return "it does not speak this protocol";
  if (version == kVersion) return "";
  return "it speaks wire version " + std::to_string(version) + ", this node version " +
         std::to_string(kVersion) + ": install the same byteps on every node";
}

bool DecodeFrameHeader(const char* data, FrameHeader* header) {
  ByteReader in(data, kFrameHeaderBytes);
  uint8_t type = 0;
  uint16_t zero = 0;
  in.Int(&type);
  in.Int(&header->values);
  in.Int(&zero);
  in.Int(&header->meta_bytes);
  if ((type != kMessage && type != kGoodbye) || zero != 0) return false;
  header->type = static_cast<FrameType>(type);
  if (type == kGoodbye) return header->values == 0 && header->meta_bytes == 0;
  return header->values <= kMaxValues && header->meta_bytes <= kMaxMetaBytes;
}

}  // namespace tcp
}  // namespace ps
