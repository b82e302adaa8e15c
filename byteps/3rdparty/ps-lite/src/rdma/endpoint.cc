#include "./endpoint.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "dmlc/logging.h"

namespace ps {
namespace rdma {
namespace {

// A receiver without a slot cannot happen; should it, this many tries are made.
constexpr int kReceiverNotReadyTries = 6;
constexpr int kReceiverNotReadyTimer = 12;  // 0.64 ms
// 4.096 us * 2^18 = 1.1 s for an acknowledgement, and as many tries: a peer that is gone
// without a word is noticed after some 8 s where heartbeats do not notice it first.
constexpr int kAckTimer = 18;
constexpr int kTries = 7;
// Completions taken at once.
constexpr int kBatch = 32;

// wr_id: the slot, and whether it is one of receives.
constexpr uint64_t kReceiveFlag = 1ull << 63;

// A connected pair of queues knows no hurry of its own: it closes by this error.
constexpr char kClosed[] = "its connection closed";

ibv_qp_attr AttributesFor(rdma_cm_id* id, ibv_qp_state state, int* mask) {
  ibv_qp_attr attributes;
  memset(&attributes, 0, sizeof(attributes));
  attributes.qp_state = state;
  if (rdma_init_qp_attr(id, &attributes, mask) != 0) {
    Throw("cannot get the attributes of a queue pair", errno);
  }
  return attributes;
}

void Modify(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  if (int error = ibv_modify_qp(qp, attributes, mask)) Throw("cannot change a queue pair", error);
}

}  // namespace

void Endpoint::FreeSlots::operator()(char* memory) const { free(memory); }

Endpoint::Endpoint(EndpointOwner* owner, Plane plane, int index, bool active,
                   const Settings& settings, std::shared_ptr<EndpointCounters> counters)
    : owner_(owner),
      plane_(plane),
      index_(index),
      active_(active),
      settings_(settings),
      slot_bytes_(settings.slot_bytes()),
      counters_(std::move(counters)) {}

Endpoint::~Endpoint() {
  // The device first: only then is nobody reading or writing what the messages hold.
  qp_.reset();
  cq_.reset();
}

// ------------------------------------------------------------- connecting

void Endpoint::Prepare(std::shared_ptr<Pool> pool, std::shared_ptr<Device> device,
                       ibv_comp_channel* channel, rdma_cm_id* id) {
  pool_ = std::move(pool);
  device_ = std::move(device);
  // A whole number of pages, so that no packet is cut short between two writes.
  max_write_ = std::min(device_->max_message_bytes(), 1u << 30) / 4096 * 4096;
  const uint32_t slots = settings_.send_depth + settings_.receive_depth;
  const size_t bytes = AlignUp(static_cast<uint64_t>(slots) * slot_bytes_, 4096);
  slots_.reset(static_cast<char*>(aligned_alloc(4096, bytes)));
  if (!slots_) Throw("cannot allocate " + std::to_string(bytes) + " bytes", ENOMEM);
  slots_region_ = std::make_unique<Region>(device_, slots_.get(), bytes, IBV_ACCESS_LOCAL_WRITE);

  cq_.reset(ibv_create_cq(device_->context(), static_cast<int>(slots) + 1, this, channel, 0));
  if (!cq_) Throw("cannot make a completion queue of " + std::to_string(slots), errno);
  if (int error = ibv_req_notify_cq(cq_.get(), 0)) Throw("cannot arm a completion queue", error);

  ibv_qp_init_attr init;
  memset(&init, 0, sizeof(init));
  init.qp_context = this;
  init.send_cq = init.recv_cq = cq_.get();
  init.qp_type = IBV_QPT_RC;
  init.sq_sig_all = 1;
  init.cap.max_send_wr = settings_.send_depth;
  init.cap.max_recv_wr = settings_.receive_depth;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  qp_.reset(ibv_create_qp(device_->pd(), &init));
  if (!qp_) Throw("cannot make a queue pair", errno);

  int mask = 0;
  ibv_qp_attr attributes = AttributesFor(id, IBV_QPS_INIT, &mask);
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  Modify(qp_.get(), &attributes, mask);

  std::lock_guard<std::mutex> lock(mu_);
  sending_.resize(settings_.send_depth);
  for (uint32_t slot = 0; slot < settings_.send_depth; ++slot) free_slots_.push_back(slot);
  for (uint32_t slot = settings_.send_depth; slot < slots; ++slot) {
    if (!PostReceive(slot)) Throw("cannot post a receive", errno);
  }
}

void Endpoint::Attach(rdma_cm_id* id, int peer_mtu) {
  int mask = 0;
  // Once more: what the connection manager knew before may have been less.
  ibv_qp_attr attributes = AttributesFor(id, IBV_QPS_INIT, &mask);
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  Modify(qp_.get(), &attributes, mask);

  attributes = AttributesFor(id, IBV_QPS_RTR, &mask);
  int mtu = attributes.path_mtu;
  for (const int limit : {settings_.path_mtu(), peer_mtu}) {
    if (limit != 0 && limit < mtu) mtu = limit;
  }
  attributes.path_mtu = static_cast<ibv_mtu>(mtu);
  attributes.min_rnr_timer = kReceiverNotReadyTimer;
  if (attributes.ah_attr.is_global) {
    if (settings_.traffic_class >= 0) {
      attributes.ah_attr.grh.traffic_class = static_cast<uint8_t>(settings_.traffic_class);
    }
    if (settings_.gid_index >= 0) {
      attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(settings_.gid_index);
    }
  }
  Modify(qp_.get(), &attributes, mask);

  attributes = AttributesFor(id, IBV_QPS_RTS, &mask);
  attributes.timeout = kAckTimer;
  attributes.retry_cnt = kTries;
  attributes.rnr_retry = kReceiverNotReadyTries;
  Modify(qp_.get(), &attributes, mask | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
}

void Endpoint::SetPeerSlots(uint32_t slots) {
  std::lock_guard<std::mutex> lock(mu_);
  credits_ += slots;
}

void Endpoint::Open() {
  Turn turn;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != State::kConnecting) return;
    state_ = State::kOpen;
    was_open_ = true;
    Pump(&turn);
  }
  Finish(&turn);
}

// ---------------------------------------------------------------- sending

void Endpoint::Send(OutgoingPtr message) {
  Turn turn;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kClosed) return;
    queued_bytes_ += message->bytes();
    outbox_.push_back(std::move(message));
    Pump(&turn);
  }
  Finish(&turn);
}

void Endpoint::SayGoodbye() {
  Turn turn;
  {
    std::lock_guard<std::mutex> lock(mu_);
    goodbye_wanted_ = true;
    Pump(&turn);
  }
  Finish(&turn);
}

bool Endpoint::flushed() {
  std::lock_guard<std::mutex> lock(mu_);
  if (state_ != State::kOpen) return true;
  return goodbye_sent_ && free_slots_.size() == sending_.size();
}

size_t Endpoint::queued_bytes() {
  std::lock_guard<std::mutex> lock(mu_);
  return queued_bytes_;
}

void Endpoint::Pump(Turn* turn) {
  if (state_ != State::kOpen) return;
  // What lets the peer go on goes first, new messages last.
  while (!grants_.empty() && CanSend() && state_ == State::kOpen) {
    const Grant grant = grants_.front();
    grants_.pop_front();
    SendFrame(kGrant, grant.id, nullptr, &grant.body, turn);
  }
  while (!writes_.empty() && CanSend() && state_ == State::kOpen) WriteNext(turn);
  while (!outbox_.empty() && CanSend() && state_ == State::kOpen) SendNext(turn);
  const bool silent = outbox_.empty() && offered_.empty() && writes_.empty();
  if (goodbye_wanted_ && !goodbye_sent_ && silent && CanSend() && state_ == State::kOpen) {
    goodbye_sent_ = true;
    SendFrame(kGoodbye, 0, nullptr, nullptr, turn);
  }
  const bool owes_much = owed_ >= settings_.receive_depth / 2;
  if (owes_much && credits_ > 0 && !free_slots_.empty() && state_ == State::kOpen) {
    SendFrame(kCredit, 0, nullptr, nullptr, turn);
  }
}

void Endpoint::SendNext(Turn* turn) {
  OutgoingPtr message = std::move(outbox_.front());
  outbox_.pop_front();
  if (message->in_region) {
    const uint32_t id = ++last_id_;
    SendFrame(kOffer, id, message.get(), nullptr, turn);
    offered_[id] = std::move(message);
    return;
  }
  queued_bytes_ -= message->bytes();
  ++counters_->messages_sent;
  counters_->bytes_sent += message->bytes();
  SendFrame(kMessage, 0, message.get(), nullptr, turn);
  turn->done.push_back(std::move(message));  // all of it was copied
}

void Endpoint::SendFrame(FrameType type, uint32_t id, const Outgoing* content,
                         const GrantBody* grant, Turn* turn) {
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  char* const frame = SlotOf(slot);
  char* at = frame + sizeof(FrameHeader);
  const auto append = [&at](const void* data, size_t bytes) {
    if (bytes > 0) memcpy(at, data, bytes);
    at += bytes;
  };
  FrameHeader header;
  memset(&header, 0, sizeof(header));
  header.type = type;
  header.id = id;
  header.credits = owed_;
  owed_ = 0;
  if (grant != nullptr) append(grant, sizeof(*grant));
  if (content != nullptr) {
    header.values = static_cast<uint16_t>(content->sizes.size());
    header.meta_bytes = static_cast<uint32_t>(content->meta.size());
    header.meta_in_region = content->meta_in_region;
    append(content->sizes.data(), content->sizes.size() * sizeof(uint64_t));
    if (!content->meta_in_region) append(content->meta.data(), content->meta.size());
    if (type == kMessage) {
      for (const auto& value : content->values) append(value.data(), value.size());
    }
  }
  memcpy(frame, &header, sizeof(header));
  sending_[slot].type = type;
  sending_[slot].key = content == nullptr ? 0 : content->key;

  ibv_sge piece;
  piece.addr = reinterpret_cast<uintptr_t>(frame);
  piece.length = static_cast<uint32_t>(at - frame);
  piece.lkey = slots_region_->lkey();
  ibv_send_wr request;
  memset(&request, 0, sizeof(request));
  request.wr_id = slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  --credits_;
  PostSend(&request, turn);
}

void Endpoint::WriteNext(Turn* turn) {
  Outgoing* message = writes_.front().get();
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  const uint64_t left = message->length - message->written;
  const bool last = left <= max_write_;
  ibv_sge piece;
  piece.addr = reinterpret_cast<uintptr_t>(message->address) + message->written;
  piece.length = static_cast<uint32_t>(last ? left : max_write_);
  piece.lkey = message->lkey;
  ibv_send_wr request;
  memset(&request, 0, sizeof(request));
  request.wr_id = slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = last ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  request.imm_data = message->cookie;
  request.wr.rdma.remote_addr = message->remote_address + message->written;
  request.wr.rdma.rkey = message->remote_key;
  message->written += piece.length;
  sending_[slot].type = 0;
  sending_[slot].key = message->key;
  if (last) {
    --credits_;  // the immediate takes a slot
    queued_bytes_ -= message->bytes();
    ++counters_->messages_sent;
    counters_->bytes_sent += message->bytes();
    sending_[slot].message = std::move(writes_.front());
    writes_.pop_front();
  }
  PostSend(&request, turn);
}

void Endpoint::PostSend(ibv_send_wr* request, Turn* turn) {
  ibv_send_wr* bad = nullptr;
  if (int error = ibv_post_send(qp_.get(), request, &bad)) {
    free_slots_.push_back(static_cast<uint32_t>(request->wr_id));
    Close(std::string("a send could not be posted: ") + strerror(error), turn);
  }
}

bool Endpoint::PostReceive(uint32_t slot) {
  ibv_sge piece;
  piece.addr = reinterpret_cast<uintptr_t>(SlotOf(slot));
  piece.length = slot_bytes_;
  piece.lkey = slots_region_->lkey();
  ibv_recv_wr request;
  memset(&request, 0, sizeof(request));
  request.wr_id = slot | kReceiveFlag;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  if (int error = ibv_post_recv(qp_.get(), &request, &bad)) {
    errno = error;
    return false;
  }
  ++receives_posted_;
  return true;
}

// ------------------------------------------------------------ completions

bool Endpoint::Poll() {
  ibv_wc completions[kBatch];
  const int count = ibv_poll_cq(cq_.get(), kBatch, completions);
  if (count == 0) return false;
  Turn turn;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (count < 0) Close("its completion queue cannot be read", &turn);
    for (int i = 0; i < count; ++i) Complete(completions[i], &turn);
    Pump(&turn);
  }
  Finish(&turn);
  return count > 0;
}

void Endpoint::Complete(const ibv_wc& wc, Turn* turn) {
  if (wc.wr_id & kReceiveFlag) {
    CompleteReceive(wc, turn);
  } else {
    CompleteSend(wc, turn);
  }
}

void Endpoint::CompleteSend(const ibv_wc& wc, Turn* turn) {
  const auto slot = static_cast<uint32_t>(wc.wr_id);
  Sending& sending = sending_[slot];
  free_slots_.push_back(slot);
  if (wc.status != IBV_WC_SUCCESS && state_ != State::kClosed) {
    if (wc.status == IBV_WC_WR_FLUSH_ERR || disconnected_) {
      Close(kClosed, turn);
    } else {
      static const char* const kWhat[] = {"an RDMA write", "a message",      "an offer",
                                          "a grant",       "a credit frame", "a goodbye"};
      char key[40] = "";
      if (sending.key != 0) {
        snprintf(key, sizeof(key), " of key 0x%llx", static_cast<unsigned long long>(sending.key));
      }
      Close("sending " + std::string(kWhat[sending.type]) + key + " failed: " + Describe(wc), turn);
    }
  }
  if (sending.message) turn->done.push_back(std::move(sending.message));
}

void Endpoint::CompleteReceive(const ibv_wc& wc, Turn* turn) {
  const auto slot = static_cast<uint32_t>(wc.wr_id & ~kReceiveFlag);
  --receives_posted_;
  if (wc.status != IBV_WC_SUCCESS) {
    if (wc.status == IBV_WC_WR_FLUSH_ERR || disconnected_) {
      Close(kClosed, turn);
    } else {
      Close("a receive failed: " + Describe(wc), turn);
    }
    return;
  }
  if (state_ == State::kClosed) return;
  if (state_ == State::kConnecting) {  // this is ahead of the event that says so
    state_ = State::kOpen;
    was_open_ = true;
  }
  try {
    if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
      ReadImmediate(wc.imm_data, turn);
    } else {
      ReadFrame(SlotOf(slot), wc.byte_len, turn);
    }
  } catch (const dmlc::Error& e) {
    return Close(e.what(), turn);
  }
  if (state_ == State::kClosed) return;
  if (!PostReceive(slot)) {
    return Close(std::string("a receive could not be posted: ") + strerror(errno), turn);
  }
  ++owed_;
}

namespace {

[[noreturn]] void BadFrame(const char* what) {
  throw dmlc::Error(std::string("it sent a frame that does not parse (") + what +
                    "): install the same byteps on every node");
}

}  // namespace

void Endpoint::ReadFrame(const char* frame, uint32_t bytes, Turn* turn) {
  FrameHeader header;
  if (bytes < sizeof(header)) BadFrame("short");
  memcpy(&header, frame, sizeof(header));
  const char* body = frame + sizeof(header);
  bytes -= sizeof(header);
  if (header.credits > 1u << 24) BadFrame("credits");
  credits_ += header.credits;
  switch (header.type) {
    case kMessage:
    case kOffer:
      return ReadContent(header, body, bytes, turn);
    case kGrant:
      return ReadGrant(header, body, bytes);
    case kCredit:
      return;
    case kGoodbye:
      goodbye_received_ = true;
      return;
    default:
      BadFrame("type");
  }
}

void Endpoint::ReadContent(const FrameHeader& header, const char* body, uint32_t bytes,
                           Turn* turn) {
  const uint32_t meta_here = header.meta_in_region ? 0 : header.meta_bytes;
  const uint64_t sizes_bytes = header.values * sizeof(uint64_t);
  if (header.values > kMaxValues || bytes < sizes_bytes || bytes - sizes_bytes < meta_here) {
    BadFrame("sizes");
  }
  std::vector<uint64_t> sizes(header.values);
  memcpy(sizes.data(), body, sizes_bytes);
  body += sizes_bytes;
  bytes -= static_cast<uint32_t>(sizes_bytes) + meta_here;
  uint64_t total = 0;
  for (const uint64_t size : sizes) {
    if (size > kMaxValueBytes) BadFrame("a value");
    total += size;
  }
  Received parts;
  parts.meta.assign(body, meta_here);
  parts.bytes = header.meta_bytes + total;
  body += meta_here;
  if (header.type == kMessage) {
    if (header.meta_in_region || bytes != total) BadFrame("values");
    SArray<char> values;
    values.CopyFrom(body, total);
    parts.values = Split(values, 0, sizes);
    Deliver(std::move(parts), turn);
    return;
  }
  Incoming incoming;
  incoming.parts = std::move(parts);
  incoming.meta_in_region = header.meta_in_region ? header.meta_bytes : 0;
  incoming.sizes = std::move(sizes);
  const Pool::Buffer buffer = pool_->Take(AlignUp(incoming.meta_in_region, kRegionAlign) + total);
  incoming.region = buffer.bytes;
  Grant grant;
  grant.id = header.id;
  grant.body.address = reinterpret_cast<uintptr_t>(buffer.bytes.data());
  grant.body.rkey = buffer.rkey;
  grant.body.cookie = ++last_cookie_;
  grants_.push_back(grant);
  incoming_[grant.body.cookie] = std::move(incoming);
}

void Endpoint::ReadGrant(const FrameHeader& header, const char* body, uint32_t bytes) {
  GrantBody grant;
  if (bytes < sizeof(grant)) BadFrame("grant");
  memcpy(&grant, body, sizeof(grant));
  auto it = offered_.find(header.id);
  if (it == offered_.end()) BadFrame("a grant of what was not offered");
  it->second->remote_address = grant.address;
  it->second->remote_key = grant.rkey;
  it->second->cookie = grant.cookie;
  writes_.push_back(std::move(it->second));
  offered_.erase(it);
}

void Endpoint::ReadImmediate(uint32_t cookie, Turn* turn) {
  auto it = incoming_.find(cookie);
  if (it == incoming_.end()) BadFrame("a write to what was not granted");
  Incoming incoming = std::move(it->second);
  incoming_.erase(it);
  const uint32_t meta = incoming.meta_in_region;
  if (meta > 0) incoming.parts.meta.assign(incoming.region.data(), meta);
  incoming.parts.values = Split(incoming.region, AlignUp(meta, kRegionAlign), incoming.sizes);
  Deliver(std::move(incoming.parts), turn);
}

void Endpoint::Deliver(Received parts, Turn* turn) {
  ++counters_->messages_received;
  counters_->bytes_received += parts.bytes;
  turn->received.push_back(std::move(parts));
}

// ----------------------------------------------------------------- ending

void Endpoint::Disconnected() {
  std::lock_guard<std::mutex> lock(mu_);
  if (disconnected_ || state_ == State::kClosed) return;
  disconnected_ = true;
  // The device gives all requests back, behind what it has received.
  StopQueuePair();
}

void Endpoint::Fail(const std::string& reason) {
  Turn turn;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Close(reason, &turn);
  }
  Finish(&turn);
}

void Endpoint::Close(const std::string& reason, Turn* turn) {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  turn->closed = true;
  turn->reason = reason;
  turn->orderly = goodbye_received_;
  StopQueuePair();
  // These are known to this side alone.  What was written from, or is written to, stays
  // until the device has given the requests back.
  for (auto& message : outbox_) turn->done.push_back(std::move(message));
  for (auto& offer : offered_) turn->done.push_back(std::move(offer.second));
  outbox_.clear();
  offered_.clear();
  grants_.clear();
}

void Endpoint::StopQueuePair() {
  if (!qp_) return;
  ibv_qp_attr attributes;
  memset(&attributes, 0, sizeof(attributes));
  attributes.qp_state = IBV_QPS_ERR;
  if (int error = ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE)) {
    LOG(WARNING) << "cannot stop a queue pair: " << strerror(error);
  }
}

bool Endpoint::closed() {
  std::lock_guard<std::mutex> lock(mu_);
  return state_ == State::kClosed;
}

bool Endpoint::was_open() {
  std::lock_guard<std::mutex> lock(mu_);
  return was_open_;
}

bool Endpoint::finished() {
  std::lock_guard<std::mutex> lock(mu_);
  if (state_ != State::kClosed) return false;
  return receives_posted_ == 0 && free_slots_.size() == sending_.size();
}

void Endpoint::Finish(Turn* turn) {
  for (auto& parts : turn->received) {
    try {
      owner_->OnMessage(this, std::move(parts));
    } catch (const dmlc::Error& e) {
      Fail(e.what());
    }
  }
  if (turn->closed) owner_->OnClosed(this, turn->reason, turn->orderly);
}

}  // namespace rdma
}  // namespace ps
