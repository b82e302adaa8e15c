#include "byteps/net/rdma/wire.h"

#include <algorithm>
#include <cstring>

#include "byteps/base/wire.h"
#include "byteps/net/auth/secret.h"
#include "byteps/net/link/admission.h"

namespace ps {
namespace rdma {
namespace {

constexpr size_t kPreambleBytes = 8;
constexpr size_t kRefusalBytes = 148;  // limit of the connection manager
// Offset of the proof in a refusal. The reason before the proof ends with a zero.
constexpr size_t kRefusalProof = kRefusalBytes - 1 - kAnswerProofBytes;
static_assert(kMaxReason == kRefusalProof - kPreambleBytes - 1, "all the room that is left");
constexpr uint8_t kMetaInRegion = 1;
constexpr uint8_t kHasOffer = 2;
constexpr uint8_t kTakesOffer = 4;
// Limit of slots. No device has longer queues, and none returns more requests than were posted.
constexpr uint32_t kMaxSlots = 65535;
constexpr uint8_t kMaxMtu = 5;  // IBV_MTU_4096
constexpr uint8_t kDataPlane = 1;
constexpr uint8_t kAuthenticates = 2;
constexpr uint8_t kResumes = 4;
constexpr uint8_t kMayMove = 8;
constexpr uint8_t kProbes = 16;
constexpr uint8_t kAllFlags = 31;
// Last byte of a refusal which says that the peer may soon try again.
constexpr uint8_t kAgainSoon = 1;
constexpr uint32_t kChallengeMagic = 0x434d5242;  // "BRMC"

std::string Preamble() {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(kMagic);
  out.Int(kVersion);
  return bytes;
}

}  // namespace

const char kWhoConnects[] = "connects";
const char kWhoListens[] = "listens";
const char kWhoChallenges[] = "challenges";
const char kWhoRefuses[] = "refuses";

std::string Mismatch(const char* data, size_t bytes) {
  ByteReader in(data, bytes);
  uint32_t magic = 0, version = 0;
  if (!in.Int(&magic) || !in.Int(&version) || magic != kMagic) {
    return "what it sent is not of this protocol";
  }
  if (version == kVersion) return "";
  return "it speaks RDMA wire version " + std::to_string(version) + ", this node version " +
         std::to_string(kVersion) + ": install the same byteps on every node";
}

std::string ConnectRequest::Claims() const {
  std::string bytes = Preamble();
  ByteWriter out(&bytes);
  out.Int(job);
  out.Int(sender);
  out.Int(rank);
  out.Int(slot_bytes);
  out.Int<uint16_t>(slots);
  out.Int<uint8_t>((is_data_plane ? kDataPlane : 0) | (authenticates ? kAuthenticates : 0) |
                   (resumes ? kResumes : 0) | (may_move ? kMayMove : 0) | (probes ? kProbes : 0));
  out.Int(index);
  out.Int(mtu);
  out.Int(role);
  out.Int(attempt);
  return bytes;
}

bool ConnectRequest::has_proof() const {
  return proof.find_first_not_of('\0') != std::string::npos;
}

std::string ConnectRequest::Encode() const {
  std::string bytes = Claims() + proof;
  bytes.resize(kConnectRequestBytes, '\0');
  return bytes;
}

bool ConnectRequest::Decode(const char* data, size_t bytes) {
  if (bytes < kConnectRequestBytes) return false;
  ByteReader in(data + kPreambleBytes, bytes - kPreambleBytes);
  uint8_t flags = 0;
  uint16_t few_slots = 0;
  in.Int(&job);
  in.Int(&sender);
  in.Int(&rank);
  in.Int(&slot_bytes);
  in.Int(&few_slots);
  in.Int(&flags);
  in.Int(&index);
  in.Int(&mtu);
  in.Int(&role);
  in.Int(&attempt);
  if (!in.Bytes(kRequestProofBytes, &proof)) return false;
  if (flags > kAllFlags || mtu > kMaxMtu || sender == 0) return false;
  slots = few_slots;
  is_data_plane = (flags & kDataPlane) != 0;
  authenticates = (flags & kAuthenticates) != 0;
  resumes = (flags & kResumes) != 0;
  may_move = (flags & kMayMove) != 0;
  probes = (flags & kProbes) != 0;
  return slots > 1 && index < kMaxEndpoints && (is_data_plane || index == 0);
}

std::string ConnectReply::Claims() const {
  std::string bytes = Preamble();
  ByteWriter out(&bytes);
  out.Int(job);
  out.Int(sender);
  out.Int(slots);
  out.Int(slot_bytes);
  out.Int(mtu);
  return bytes;
}

std::string ConnectReply::Encode() const {
  std::string fixed = proof;
  fixed.resize(auth::kProofBytes, '\0');
  return Claims() + fixed;
}

bool ConnectReply::Decode(const char* data, size_t bytes) {
  if (bytes < kPreambleBytes) return false;
  ByteReader in(data + kPreambleBytes, bytes - kPreambleBytes);
  in.Int(&job);
  in.Int(&sender);
  in.Int(&slots);
  in.Int(&slot_bytes);
  in.Int(&mtu);
  return in.Bytes(auth::kProofBytes, &proof) && mtu <= kMaxMtu && slots > 1 && slots <= kMaxSlots;
}

std::string Challenge::Claims() const {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(kChallengeMagic);
  out.Int(kVersion);
  out.Int(sender);
  out.Bytes(nonce);
  return bytes;
}

std::string Challenge::Encode() const {
  std::string fixed = proof;
  fixed.resize(kAnswerProofBytes, '\0');
  return Claims() + fixed;
}

bool Challenge::Decode(const char* data, size_t bytes) {
  ByteReader in(data, bytes);
  uint32_t magic = 0, version = 0;
  if (!in.Int(&magic) || !in.Int(&version) || magic != kChallengeMagic || version != kVersion) {
    return false;
  }
  return in.Int(&sender) && in.Bytes(auth::kNonceBytes, &nonce) &&
         in.Bytes(kAnswerProofBytes, &proof);
}

std::string Refusal::Claims() const {
  return reason.substr(0, kMaxReason) + (again_soon ? '\1' : '\0');
}

std::string Refusal::Encode() const {
  std::string bytes = Preamble() + reason.substr(0, kMaxReason);
  bytes.resize(kRefusalBytes);  // zeros end the reason
  if (!proof.empty()) bytes.replace(kRefusalProof, kAnswerProofBytes, proof);
  if (again_soon) bytes.back() = kAgainSoon;
  return bytes;
}

bool Refusal::Decode(const char* data, size_t bytes) {
  ByteReader in(data, bytes);
  uint32_t magic = 0, version = 0;
  if (!in.Int(&magic) || !in.Int(&version) || magic != kMagic) return false;
  // The refusal's text is read whatever the version, so that a peer of another version gets the
  // reason.
  const size_t room = std::min(bytes, kRefusalBytes - 1) - kPreambleBytes;
  reason.assign(data + kPreambleBytes, strnlen(data + kPreambleBytes, room));
  if (version == kVersion && bytes >= kRefusalBytes) {
    reason = reason.substr(0, kMaxReason);
    again_soon = data[kRefusalBytes - 1] == kAgainSoon;
    proof.assign(data + kRefusalProof, kAnswerProofBytes);
  }
  return !reason.empty();
}

std::string FrameHeader::Encode() const {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int<uint8_t>(type);
  out.Int<uint8_t>((meta_in_region ? kMetaInRegion : 0) | (has_offer ? kHasOffer : 0) |
                   (takes_offer ? kTakesOffer : 0));
  out.Int(values);
  out.Int<uint8_t>(0);
  out.Int(credits);
  out.Int(id);
  out.Int(meta_bytes);
  return bytes;
}

bool FrameHeader::Decode(const char* data, size_t bytes) {
  ByteReader in(data, bytes);
  uint8_t what = 0, flags = 0, zero = 0;
  in.Int(&what);
  in.Int(&flags);
  in.Int(&values);
  in.Int(&zero);
  in.Int(&credits);
  in.Int(&id);
  if (!in.Int(&meta_bytes)) return false;
  if (what < kMessage || what > kResume || zero != 0) return false;
  type = static_cast<FrameType>(what);
  // The frame may have at most one of these flags.
  meta_in_region = flags == kMetaInRegion;
  has_offer = flags == kHasOffer;
  takes_offer = flags == kTakesOffer;
  if (flags != 0 && !(meta_in_region || has_offer || takes_offer)) return false;
  if (flags != 0 && type != kRts && !(has_offer && type == kMessage)) return false;
  return values <= kMaxValues && credits <= kMaxSlots && meta_bytes <= kMaxMetaBytes;
}

std::string Target::Encode() const {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Int(address);
  out.Int(rkey);
  out.Int(cookie);
  return bytes;
}

bool Target::Decode(const char* data, size_t bytes) {
  ByteReader in(data, bytes);
  in.Int(&address);
  in.Int(&rkey);
  return in.Int(&cookie) && in.left() == 0;
}

std::string Offer::Encode() const {
  std::string encoded = target.Encode();
  ByteWriter(&encoded).Int(bytes);
  return encoded;
}

bool Offer::Decode(const char* data, size_t size) {
  const size_t last = kOfferBytes - sizeof(bytes);
  if (size != kOfferBytes || !target.Decode(data, last)) return false;
  return ByteReader(data + last, sizeof(bytes)).Int(&bytes) && bytes > 0 && bytes <= kMaxValueBytes;
}

std::string Resume::Encode() const {
  std::string bytes;
  ByteWriter(&bytes).Int(received);
  return bytes;
}

bool Resume::Decode(const char* data, size_t bytes) {
  ByteReader in(data, bytes);
  return in.Int(&received) && in.left() == 0;
}

}  // namespace rdma
}  // namespace ps
