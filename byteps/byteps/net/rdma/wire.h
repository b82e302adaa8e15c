// What two endpoints say to each other, byte for byte.  All fields are little endian.
//
// A connection request carries a ConnectRequest, its acceptance a ConnectReply, its
// refusal a Refusal.  All begin with the same eight bytes in every version; what follows,
// and all that is said on the connection, is of that version.
//
// In a job with a secret the first request is rejected with a Challenge, and the second one,
// the same but for that, has a proof (net/auth/secret.h) over request and challenge; the reply has
// another one.  Who listens keeps nothing meanwhile: it knows its challenge again.  A proof of what
// the listener says is over that, too.  A failed greeting: see link/admission.h; a challenge,
// a reply or a refusal without a proof may have been damaged.
//
// A request that probes a path is rejected with no word, before anything else of it is looked at.
//
// On the connection, each side first says in a Resume how many messages it has received since
// the first connection of the two endpoints, and sends none before it knows the same of the other
// side.  A message has been received with its frame, or with the immediate of its last write.
//
// Each send is a frame into one of the receiver's slots:
//
//   FrameHeader | bytes of each value u64 ... | Offer, if it has one | meta | values
//
// A small message is one such frame.  The values of a larger one are written into memory
// of the receiver's (and so is a meta that no slot could hold):
//
//   sender                                        receiver
//     | -- RTS, request to send (id, meta) -------> |  finds memory
//     | <-- CTS, clear to send (id, where) -------- |
//     | == RDMA WRITE, last with an immediate ====> |  the message is there
//
// A request may offer the place of its answer's value.  Then the answer's RTS names the offer, and
// the write follows it at once:
//
//   who asks                                      who answers
//     | -- request, with an Offer ----------------> |
//     | <-- RTS (cookie of the offer, meta) ------- |
//     | <== RDMA WRITE, last with an immediate ==== |
//
// Each answer uses its offer up, also one that goes another way: it fails, or it is small.  Offers
// are forgotten with their connection.
//
// Credits.  A receiver posts as many slots as it told when the connection was made; each
// frame, and each immediate, uses one up.  Every frame gives back those that are free
// again.  The last credit is kept for a frame that only gives credits back, so that two
// sides that both have much to say cannot wait for each other.
#ifndef BYTEPS_NET_RDMA_WIRE_H_
#define BYTEPS_NET_RDMA_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace ps {
namespace rdma {

constexpr uint32_t kMagic = 0x444d5242;  // "BRMD"
constexpr uint32_t kVersion = 8;

// What a peer that begins so must be told; "" if it speaks as we do.
std::string Mismatch(const char* data, size_t bytes);

// Decoding tells false where bytes are missing, or say what nobody says.
struct ConnectRequest {
  uint64_t job = 0;     // 0: not known yet, to the scheduler alone
  uint64_t sender = 0;  // names the process that asks
  int32_t rank = -1;    // of a worker, or of a server to a server; -1: the scheduler says it
  uint8_t role = 0;     // a Node::Role, of the sender
  uint32_t slots = 0;   // that the sender has posted
  uint32_t slot_bytes = 0;
  bool is_data_plane = false;
  bool authenticates = false;
  bool resumes = false;   // there was a connection before, and it broke
  bool may_move = false;  // the sender knows other paths, and leaves one that is silent
  bool probes = false;    // it asks for no connection, but whether a request passes
  uint8_t index = 0;      // among the endpoints of its plane
  uint8_t mtu = 0;        // greatest path MTU, as an ibv_mtu; 0: any
  uint16_t attempt = 0;   // another one for each, since a proof is of use once
  std::string proof;      // kRequestProofBytes; zeros: none yet

  // What the proofs are over.
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

  // What its proof is over, behind what was said before.
  std::string Claims() const;
  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};

// In the place of a Refusal: ask again, with a proof.
struct Challenge {
  uint64_t sender = 0;
  std::string nonce;  // auth::kNonceBytes
  std::string proof;  // kAnswerProofBytes

  // What its proof is over, behind the claims of the request.
  std::string Claims() const;
  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};
// Of a challenge and of a refusal: there is no room for more.
constexpr size_t kAnswerProofBytes = 16;
// A longer one of a refusal is cut.
constexpr size_t kMaxReason = 122;

struct Refusal {
  std::string reason;
  bool again_soon = false;  // what stands in the way will pass
  std::string proof;        // kAnswerProofBytes; zeros: none

  // What its proof is over, behind what was said before.
  std::string Claims() const;
  // At most 148 bytes.
  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};
// Who proves what, in a proof.
extern const char kWhoConnects[];
extern const char kWhoListens[];
extern const char kWhoChallenges[];
extern const char kWhoRefuses[];

enum FrameType : uint8_t {
  kMessage = 1,
  kRts = 2,
  kCts = 3,
  kCredit = 4,
  kGoodbye = 5,  // nothing follows; the connection will be closed
  kResume = 6,   // a Resume follows; the first frame of each side
};

struct FrameHeader {
  FrameType type = kMessage;
  bool meta_in_region = false;  // RTS: the meta is written as well, before the values
  bool has_offer = false;       // message, RTS: an Offer follows the sizes
  bool takes_offer = false;     // RTS: `id` is the cookie of an offer, and no CTS is waited for
  uint8_t values = 0;           // how many
  uint32_t credits = 0;         // given back
  uint32_t id = 0;              // RTS, CTS: the sender's number of the message
  uint32_t meta_bytes = 0;

  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};
constexpr size_t kFrameHeaderBytes = 16;

// Follows the header of a CTS.
struct Target {
  uint64_t address = 0;
  uint32_t rkey = 0;
  uint32_t cookie = 0;  // the immediate that ends the write; sent in network order

  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};

// Where the one value of the answer to a request belongs.
struct Offer {
  Target target;
  uint64_t bytes = 0;  // of the value: another one goes elsewhere

  std::string Encode() const;
  bool Decode(const char* data, size_t size);
};
constexpr size_t kOfferBytes = 24;

// Follows the header of a kResume.
struct Resume {
  uint64_t received = 0;  // messages, in the order in which they came

  std::string Encode() const;
  bool Decode(const char* data, size_t bytes);
};

// More than any message of ours has (BYTEPS_PARTITION_BYTES is 1 GiB at most); one that
// claims more is refused.
constexpr uint64_t kMaxValueBytes = (1ull << 30) + (1ull << 20);
constexpr uint32_t kMaxValues = 16;
constexpr uint32_t kMaxEndpoints = 64;  // of a plane, of a pair
// What a peer that is no member of the job may say at once.
constexpr uint32_t kStrangersMetaBytes = 65536;
// Room in a slot in addition to small values: header, sizes and a usual meta.
constexpr uint32_t kHeadRoom = 1024;
// A meta in a region takes whole units, so that the values behind it are aligned.
constexpr uint64_t kRegionAlign = 64;

inline uint64_t AlignUp(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_WIRE_H_
