// Bytes that two endpoints exchange. All fields are little-endian.
//
// A connection request carries a ConnectRequest, its acceptance a ConnectReply, its refusal a
// Refusal. In every version, all three start with the same eight bytes; the rest depends on the
// version.
//
// In a job with a secret, the first request is rejected with a Challenge. The second request
// repeats the first, plus a proof (net/auth/secret.h) over request and challenge. The reply has
// another proof. The listener keeps no state between the two requests, because it recognizes its
// own challenge. The listener's proofs also cover the listener's claims. link/admission.h defines
// the meaning of a failed greeting. A challenge, reply or refusal without a proof may have been
// corrupted.
//
// A request that only probes a path is rejected without content, before anything else in it is
// checked.
//
// On a connection, each side first tells in a Resume how many messages it has received since the
// first connection of the two endpoints. A side sends no message before it has the peer's Resume. A
// message counts as received when its frame, or the immediate of its last write, has arrived.
//
// Each send is a frame into one of the receiver's slots:
//
//   FrameHeader | bytes of each value u64 ... | Offer, if it has one | meta | values
//
// A small message is one frame. A larger message's values are written into the receiver's memory,
// and so is a meta that is too large for a slot:
//
//   sender                                        receiver
//     | -- RTS, request to send (id, meta) -------> |  finds memory
//     | <-- CTS, clear to send (id, where) -------- |
//     | == RDMA WRITE, last with an immediate ====> |  the message is there
//
// A request may offer the destination of its answer's value. The answer's RTS then names the offer,
// and the write follows at once:
//
//   requester                                     responder
//     | -- request, with an Offer ----------------> |
//     | <-- RTS (cookie of the offer, meta) ------- |
//     | <== RDMA WRITE, last with an immediate ==== |
//
// Each answer consumes its offer, even an answer that does not use the offer because it failed or
// is small. Offers end with their connection.
//
// Credits: a receiver has posted as many receives as it announced slots when connecting. Each frame
// and each immediate uses up one slot. Every frame returns credits for slots that are free again.
// The last credit is reserved for a frame that only returns credits, so two busy sides cannot
// deadlock.
#ifndef BYTEPS_NET_RDMA_WIRE_H_
#define BYTEPS_NET_RDMA_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace ps {
namespace rdma {

constexpr uint32_t kMagic = 0x444d5242;  // "BRMD"
constexpr uint32_t kVersion = 8;

// Returns the bytes that reject a peer whose message starts with `data`; "" if its protocol and
// version match.
std::string Mismatch(const char* data, size_t bytes);

// Decode functions return false if bytes are missing or invalid.
struct ConnectRequest {
  uint64_t job = 0;     // number of the job; 0: unknown, which only the scheduler accepts
  uint64_t sender = 0;  // token of the process that sends the request
  int32_t rank = -1;    // rank of the sender; -1: the scheduler decides
  uint8_t role = 0;     // the sender's Node::Role
  uint32_t slots = 0;   // number of receive slots that the sender has posted
  uint32_t slot_bytes = 0;
  bool is_data_plane = false;
  bool authenticates = false;
  bool resumes = false;   // whether there was a connection before, which broke
  bool may_move = false;  // whether the sender knows other paths, and leaves a silent one
  bool probes = false;    // whether the request only tests that requests pass
  uint8_t index = 0;      // index of the endpoint in its plane
  uint8_t mtu = 0;        // largest path MTU, as an ibv_mtu; 0: any
  uint16_t attempt = 0;   // differs for each attempt: a proof is valid once
  std::string proof;      // kRequestProofBytes bytes; all zero before the challenge

  // Returns the bytes of the request that the proofs cover.
  std::string Claims() const;
  bool has_proof() const;
  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};
constexpr size_t kRequestProofBytes = 16;
constexpr size_t kConnectRequestBytes = 56;
static_assert(kConnectRequestBytes <= 56, "more does not fit into a request");

struct ConnectReply {
  uint64_t job = 0;
  uint64_t sender = 0;
  uint32_t slots = 0;
  uint32_t slot_bytes = 0;
  uint8_t mtu = 0;
  std::string proof;  // auth::kProofBytes

  // Returns the bytes that the proof covers after the claims of request and challenge.
  std::string Claims() const;
  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};

// Answer to a request without a proof. It asks for another request, with a proof.
struct Challenge {
  uint64_t sender = 0;
  std::string nonce;  // auth::kNonceBytes
  std::string proof;  // kAnswerProofBytes

  // Returns the bytes that the proof covers after the request's claims.
  std::string Claims() const;
  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};
// Size of a proof in a challenge or refusal; there is no room for more.
constexpr size_t kAnswerProofBytes = 16;
// Limit of the bytes of a refusal's reason. Longer reasons are cut.
constexpr size_t kMaxReason = 122;

struct Refusal {
  std::string reason;
  bool again_soon = false;  // whether the reason will soon be gone, so that the peer may try again
  std::string proof;        // kAnswerProofBytes bytes; all zero without a proof

  // Returns the bytes that the proof covers after all claims of the greeting so far.
  std::string Claims() const;
  // Returns at most 148 bytes.
  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};
// Labels for the sender of a proof. Each proof also covers its label.
extern const char kWhoConnects[];
extern const char kWhoListens[];
extern const char kWhoChallenges[];
extern const char kWhoRefuses[];

enum FrameType : uint8_t {
  kMessage = 1,
  kRts = 2,
  kCts = 3,
  kCredit = 4,
  kGoodbye = 5,  // no content; the connection will be closed
  kResume = 6,   // a Resume follows; the first frame of each side
};

struct FrameHeader {
  FrameType type = kMessage;
  bool meta_in_region = false;  // RTS: whether the meta is written, too, before the values
  bool has_offer = false;       // message, RTS: whether an Offer follows the sizes
  bool takes_offer = false;     // RTS: whether `id` is the cookie of an offer; there is no CTS then
  uint8_t values = 0;           // number of values
  uint32_t credits = 0;         // number of credits that this frame returns
  uint32_t id = 0;              // RTS, CTS: the sender's id of the message
  uint32_t meta_bytes = 0;

  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};
constexpr size_t kFrameHeaderBytes = 16;

// Memory to which a message's values are written. It follows the header of a CTS.
struct Target {
  uint64_t address = 0;
  uint32_t rkey = 0;
  uint32_t cookie = 0;  // the immediate that ends the write; in network byte order

  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};

// Destination for the single value of a request's answer.
struct Offer {
  Target target;
  uint64_t bytes = 0;  // size of the value; values of another size go elsewhere

  std::string Encode() const;
  bool Decode(const char* data, size_t size);
};
constexpr size_t kOfferBytes = 24;

// Body of a kResume frame. It follows the header.
struct Resume {
  // Number of messages that the sender of this Resume has received from its peer, since the first
  // connection of the two endpoints. The peer sends its later messages again.
  uint64_t received = 0;

  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};

// Limit of the bytes of a message's values. A message that claims more is refused. No message of
// this project has as many, because BYTEPS_PARTITION_BYTES is at most 1 GiB.
constexpr uint64_t kMaxValueBytes = (1ull << 30) + (1ull << 20);
constexpr uint32_t kMaxValues = 16;
constexpr uint32_t kMaxEndpoints = 64;  // limit per plane, between two nodes
// Limit of the bytes of a message's meta, from a peer that is not in the job yet.
constexpr uint32_t kStrangersMetaBytes = 65536;
// Bytes of a slot that are not for small values. They hold the header, the sizes and a typical
// meta.
constexpr uint32_t kHeadRoom = 1024;
// A meta in a region takes a multiple of this many bytes, to align the values that follow it.
constexpr uint64_t kRegionAlign = 64;

inline uint64_t AlignUp(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_WIRE_H_
