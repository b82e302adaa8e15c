#include <algorithm>
#include <cstdint>
#include <cstring>

#include "byteps/base/wire.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/nics.h"

namespace ps {
namespace {

constexpr uint8_t kMetaVersion = 3;
constexpr uint8_t kRequest = 1;
constexpr uint8_t kPush = 2;
constexpr uint8_t kSimpleApp = 4;
// DNS limits names to 253 letters.
constexpr size_t kMaxHostBytes = 255;
constexpr int kMaxPrefix = 128;
// Bytes of the shortest node: role, id, rank, port, the lengths of two names, the number of NICs.
constexpr size_t kLeastNodeBytes = 16;
// Limit of nodes for which memory is reserved before they are read; the vector grows with more
// nodes.
constexpr size_t kNodesAtOnce = 64;
// Limit of ranks: far above any job's ranks, and low enough that ids computed from ranks stay in
// range.
constexpr int kMaxRank = 1 << 24;

void EncodeNode(const Node& node, ByteWriter* out) {
  const std::string host = node.hostname.substr(0, kMaxHostBytes);
  out->Int<uint8_t>(node.role);
  out->Int<int32_t>(node.id);
  out->Int<int32_t>(node.aux_id);
  out->Int<int32_t>(node.port);
  out->Int<uint8_t>(host.size());
  out->Bytes(host);
  out->Int<uint8_t>(node.endpoint_name_len);
  out->Bytes(node.endpoint_name, node.endpoint_name_len);
  const size_t nics = std::min(node.nics.size(), kMostNics);
  out->Int<uint8_t>(nics);
  for (size_t i = 0; i < nics; ++i) {
    const std::string address = node.nics[i].address.substr(0, kMaxHostBytes);
    out->Int<uint8_t>(address.size());
    out->Bytes(address);
    out->Int<uint8_t>(node.nics[i].prefix);
    out->Int<int32_t>(node.nics[i].mbps);
  }
}

bool IsText(const std::string& text) {
  return std::none_of(text.begin(), text.end(), [](char c) { return c <= ' ' || c == 127; });
}

bool DecodeNic(ByteReader* in, Nic* nic) {
  uint8_t address_bytes = 0, prefix = 0;
  int32_t mbps = 0;
  if (!in->Int(&address_bytes) || !in->Bytes(address_bytes, &nic->address) || !in->Int(&prefix) ||
      !in->Int(&mbps)) {
    return false;
  }
  nic->prefix = prefix;
  nic->mbps = mbps;
  return prefix <= kMaxPrefix && mbps >= 0 && !nic->address.empty() && IsText(nic->address);
}

bool DecodeNode(ByteReader* in, Node* node) {
  uint8_t role = 0, host_bytes = 0, name_bytes = 0, nics = 0;
  int32_t id = 0, aux_id = 0, port = 0;
  std::string name;
  if (!in->Int(&role) || !in->Int(&id) || !in->Int(&aux_id) || !in->Int(&port) ||
      !in->Int(&host_bytes) || !in->Bytes(host_bytes, &node->hostname) || !in->Int(&name_bytes) ||
      !in->Bytes(name_bytes, &name) || !in->Int(&nics) || nics > kMostNics) {
    return false;
  }
  if (role > Node::SCHEDULER || id < 0 || aux_id < -1 || aux_id > kMaxRank || port < 0 ||
      port > 65535 || !IsText(node->hostname) || name.size() > sizeof(node->endpoint_name)) {
    return false;
  }
  node->role = static_cast<Node::Role>(role);
  node->id = id;
  node->aux_id = aux_id;
  node->port = port;
  node->customer_id = 0;
  memset(node->endpoint_name, 0, sizeof(node->endpoint_name));
  memcpy(node->endpoint_name, name.data(), name.size());
  node->endpoint_name_len = name.size();
  for (uint8_t i = 0; i < nics; ++i) {
    if (!DecodeNic(in, &node->nics.emplace_back())) return false;
  }
  return true;
}

}  // namespace

std::string EncodeMeta(const Meta& meta) {
  std::string bytes;
  bytes.reserve(64 + meta.body.size() + meta.control.node.size() * 48);
  ByteWriter out(&bytes);
  out.Int(kMetaVersion);
  out.Int<uint8_t>((meta.request ? kRequest : 0) | (meta.push ? kPush : 0) |
                   (meta.simple_app ? kSimpleApp : 0));
  out.Int<uint8_t>(meta.control.cmd);
  out.Int<int32_t>(meta.head);
  out.Int<int32_t>(meta.option);
  out.Int<uint64_t>(meta.key);
  out.Int<uint64_t>(meta.addr);
  out.Int<uint32_t>(meta.body.size());
  out.Int<uint32_t>(meta.control.node.size());
  out.Bytes(meta.body);
  for (const Node& node : meta.control.node) EncodeNode(node, &out);
  return bytes;
}

bool DecodeMeta(const char* data, size_t size, Meta* meta) {
  ByteReader in(data, size);
  uint8_t version = 0, flags = 0, command = 0;
  int32_t head = 0, option = 0;
  uint32_t body_bytes = 0, nodes = 0;
  if (!in.Int(&version) || version != kMetaVersion || !in.Int(&flags) || !in.Int(&command) ||
      !in.Int(&head) || !in.Int(&option) || !in.Int(&meta->key) || !in.Int(&meta->addr) ||
      !in.Int(&body_bytes) || !in.Int(&nodes) || !in.Bytes(body_bytes, &meta->body)) {
    return false;
  }
  if (flags > (kRequest | kPush | kSimpleApp) || command > Control::MEMBERS) return false;
  // A hostile count costs no memory: the nodes must fit in the bytes that are left, and are
  // allocated as they are read.
  if (nodes > in.left() / kLeastNodeBytes) return false;
  meta->request = (flags & kRequest) != 0;
  meta->push = (flags & kPush) != 0;
  meta->simple_app = (flags & kSimpleApp) != 0;
  meta->head = head;
  meta->option = option;
  meta->app_id = meta->customer_id = meta->timestamp = meta->val_len = 0;
  meta->data_type.clear();
  meta->control = Control();
  meta->control.cmd = static_cast<Control::Command>(command);
  meta->control.node.reserve(std::min<size_t>(nodes, kNodesAtOnce));
  for (uint32_t i = 0; i < nodes; ++i) {
    if (!DecodeNode(&in, &meta->control.node.emplace_back())) return false;
  }
  return in.left() == 0;
}

}  // namespace ps
