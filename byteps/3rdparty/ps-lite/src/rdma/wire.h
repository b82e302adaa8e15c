// What two endpoints say to each other, byte for byte.
//
// A connection request carries a ConnectRequest, its acceptance a ConnectReply, its
// refusal a Refusal.  All begin with the same two fields, in every version.
//
// On the connection, each send is a frame into one of the receiver's slots:
//
//   FrameHeader | sizes of the values, uint64 each | meta | values
//
// A small message is one such frame.  The values of a larger one are written into memory
// that the receiver offers (and so is a meta that no slot could hold):
//
//   sender                                   receiver
//     | -- kOffer (id, sizes, meta) ---------> |  takes registered memory
//     | <-- kGrant (id, address, rkey) ------- |
//     | == RDMA WRITE, last with immediate ==> |  the message is there
//
// Credits.  A receiver posts as many slots as it told when the connection was made; each
// frame, and each immediate, uses one up.  Every frame gives back those that are free
// again.  The last credit is kept for a frame that only gives credits back, so that two
// sides that both have much to say cannot wait for each other.
#ifndef PS_RDMA_WIRE_H_
#define PS_RDMA_WIRE_H_

#include <cstdint>

namespace ps {
namespace rdma {

constexpr uint32_t kMagic = 0x444d5242;  // "BRMD", little endian
constexpr uint32_t kVersion = 1;

struct ConnectRequest {
  uint32_t magic;
  uint32_t version;
  uint64_t sender;        // names the process that asks
  uint64_t receiver;      // names the process that is meant; 0: not known yet
  int32_t node_id;        // of the sender; Node::kEmpty before it has joined
  uint8_t is_data_plane;  // 0: control
  uint8_t index;          // among the endpoints of its plane
  uint16_t mtu;           // greatest path MTU, as an ibv_mtu; 0: any
  uint32_t slots;         // that the sender has posted
  uint32_t slot_bytes;
};
static_assert(sizeof(ConnectRequest) == 40, "at most 56 bytes fit into a request");

struct ConnectReply {
  uint32_t magic;
  uint32_t version;
  uint64_t sender;
  uint32_t slots;
  uint32_t slot_bytes;
  uint32_t mtu;
  uint32_t reserved;
};
static_assert(sizeof(ConnectReply) == 32, "packed");

struct Refusal {
  uint32_t magic;
  uint32_t version;
  char reason[140];  // ends with a 0
};
static_assert(sizeof(Refusal) == 148, "at most 148 bytes fit into a refusal");

enum FrameType : uint8_t {
  kMessage = 1,
  kOffer = 2,
  kGrant = 3,
  kCredit = 4,
  kGoodbye = 5,  // nothing follows; the connection will be closed
};

struct FrameHeader {
  uint8_t type;
  uint8_t meta_in_region;  // kOffer: the meta is written as well, before the values
  uint16_t values;         // how many
  uint32_t credits;        // given back
  uint32_t id;             // kOffer, kGrant: the sender's number of the message
  uint32_t meta_bytes;
};
static_assert(sizeof(FrameHeader) == 16, "packed");

// Follows the header of a kGrant.
struct GrantBody {
  uint64_t address;
  uint32_t rkey;
  uint32_t cookie;  // the immediate that ends the write
};
static_assert(sizeof(GrantBody) == 16, "packed");

// More than any message of ours; a frame that claims more is not believed.
constexpr uint64_t kMaxValueBytes = 1ull << 32;
constexpr uint32_t kMaxValues = 64;
// Room in a slot beside small values: header, sizes and a usual meta.
constexpr uint32_t kHeadRoom = 1024;
// A meta in a region takes whole units, so that the values behind it are aligned.
constexpr uint64_t kRegionAlign = 64;

inline uint64_t AlignUp(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace rdma
}  // namespace ps
#endif  // PS_RDMA_WIRE_H_
