#include "byteps/net/tcp/wire.h"

#include <algorithm>

#include "byteps/base/wire.h"
#include "byteps/net/auth/secret.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/tls/tls.h"

namespace ps {
namespace tcp {
namespace {

constexpr uint8_t kAuthenticates = 1;
constexpr uint8_t kResumes = 2;

std::string Preamble(uint16_t next) {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(kMagic);
  out.Int(kVersion);
  out.Int(next);
  return bytes;
}

// Writes exactly `size` bytes: cuts `bytes`, or pads them with zeros.
void Fixed(const std::string& bytes, size_t size, ByteWriter* out) {
  std::string fixed = bytes;
  fixed.resize(size, '\0');
  out->Bytes(fixed);
}

}  // namespace

const char kWhoConnects[] = "connects";
const char kWhoListens[] = "listens";
const char kWhoReplies[] = "replies";

std::string Hello::Encode() const {
  std::string bytes = Preamble(index);
  ByteWriter out(&bytes);
  out.Int(job);
  out.Int(sender);
  out.Int(receiver);
  out.Int(node_id);
  out.Int(rank);
  out.Int(role);
  out.Int<uint8_t>((authenticates ? kAuthenticates : 0) | (resumes ? kResumes : 0));
  out.Int<uint16_t>(0);
  out.Int<uint32_t>(0);
  out.Int(received);
  Fixed(nonce, auth::kNonceBytes, &out);
  return bytes;
}

Hello DecodeHello(const char* data) {
  ByteReader in(data + kPreambleBytes, kHelloBytes - kPreambleBytes);
  Hello hello;
  uint8_t flags = 0;
  uint16_t zero = 0;
  uint32_t zeros = 0;
  in.Int(&hello.index);
  in.Int(&hello.job);
  in.Int(&hello.sender);
  in.Int(&hello.receiver);
  in.Int(&hello.node_id);
  in.Int(&hello.rank);
  in.Int(&hello.role);
  in.Int(&flags);
  in.Int(&zero);
  in.Int(&zeros);
  in.Int(&hello.received);
  in.Bytes(auth::kNonceBytes, &hello.nonce);
  hello.authenticates = (flags & kAuthenticates) != 0;
  hello.resumes = (flags & kResumes) != 0;
  return hello;
}

std::string Challenge::Claims() const {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(job);
  out.Int(sender);
  out.Int<uint8_t>(authenticates);
  Fixed("", 7, &out);
  Fixed(nonce, auth::kNonceBytes, &out);
  return bytes;
}

std::string Challenge::Encode() const {
  const std::string reason = refusal.substr(0, kMaxRefusalBytes);
  std::string bytes = Preamble(static_cast<uint16_t>(reason.size()));
  ByteWriter out(&bytes);
  out.Bytes(Claims());
  Fixed(proof, auth::kProofBytes, &out);
  out.Bytes(reason);
  return bytes;
}

Challenge DecodeChallenge(const char* data, size_t* refusal_bytes) {
  ByteReader in(data + kPreambleBytes, kChallengeBytes - kPreambleBytes);
  Challenge challenge;
  uint16_t bytes = 0;
  uint8_t authenticates = 0;
  std::string zeros;
  in.Int(&bytes);
  in.Int(&challenge.job);
  in.Int(&challenge.sender);
  in.Int(&authenticates);
  in.Bytes(7, &zeros);
  in.Bytes(auth::kNonceBytes, &challenge.nonce);
  in.Bytes(auth::kProofBytes, &challenge.proof);
  challenge.authenticates = authenticates != 0;
  *refusal_bytes = std::min<size_t>(bytes, kMaxRefusalBytes);
  return challenge;
}

std::string Reply::Claims() const {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(received);
  out.Bytes(refusal.substr(0, kMaxRefusalBytes));
  return bytes;
}

std::string Reply::Encode() const {
  const std::string reason = refusal.substr(0, kMaxRefusalBytes);
  std::string bytes = Preamble(static_cast<uint16_t>(reason.size()));
  ByteWriter out(&bytes);
  out.Int(received);
  Fixed(proof, auth::kProofBytes, &out);
  out.Bytes(reason);
  return bytes;
}

Reply DecodeReply(const char* data, size_t* refusal_bytes) {
  ByteReader in(data + kPreambleBytes, kReplyBytes - kPreambleBytes);
  Reply reply;
  uint16_t bytes = 0;
  in.Int(&bytes);
  in.Int(&reply.received);
  in.Bytes(auth::kProofBytes, &reply.proof);
  *refusal_bytes = std::min<size_t>(bytes, kMaxRefusalBytes);
  return reply;
}

bool LooksEncrypted(const char* data) {
  // These bytes begin a TLS handshake record (RFC 8446, 5.1).
  return data[0] == 22 && data[1] == 3;
}

std::string Mismatch(const char* data) {
  ByteReader in(data, kPreambleBytes);
  uint32_t magic = 0;
  uint16_t version = 0;
  in.Int(&magic);
  in.Int(&version);
  if (LooksEncrypted(data)) {
    return std::string("it encrypts its connections, and this node does not: ") + tls::kAdvice;
  }
  if (magic != kMagic) return "it does not speak this protocol";
  if (version == kVersion) return "";
  return "it speaks wire version " + std::to_string(version) + ", this node version " +
         std::to_string(kVersion) + ": install the same byteps on every node";
}

std::string FrameHeader::Encode() const {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int<uint8_t>(type);
  out.Int(values);
  out.Int<uint16_t>(0);
  out.Int(meta_bytes);
  out.Int(received);
  return bytes;
}

bool DecodeFrameHeader(const char* data, FrameHeader* header) {
  ByteReader in(data, kFrameHeaderBytes);
  uint8_t type = 0;
  uint16_t zero = 0;
  in.Int(&type);
  in.Int(&header->values);
  in.Int(&zero);
  in.Int(&header->meta_bytes);
  in.Int(&header->received);
  if (type < kMessage || type > kReceived || zero != 0) return false;
  header->type = static_cast<FrameType>(type);
  if (type != kMessage) return header->values == 0 && header->meta_bytes == 0;
  return header->values <= kMaxValues && header->meta_bytes <= kMaxMetaBytes;
}

}  // namespace tcp
}  // namespace ps
