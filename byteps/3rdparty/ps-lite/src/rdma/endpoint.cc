#include "./endpoint.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "dmlc/logging.h"
#include "ps/wire_bytes.h"

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

// Values are written in pieces, so many of which make the window.
constexpr uint64_t kPieces = 4;

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
                       std::shared_ptr<Registrar> registrar, ibv_comp_channel* channel,
                       rdma_cm_id* id) {
  std::lock_guard<std::mutex> lock(mu_);
  if (state_ == State::kClosed) throw dmlc::Error("the endpoint was closed");
  pool_ = std::move(pool);
  device_ = std::move(device);
  registrar_ = std::move(registrar);
  // A whole number of pages, so that no packet is cut short between two writes.
  const uint64_t piece = settings_.window_bytes / kPieces;
  max_write_ = std::min<uint64_t>(device_->max_message_bytes(), piece) / 4096 * 4096;
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

  sending_.resize(settings_.send_depth);
  for (uint32_t slot = 0; slot < settings_.send_depth; ++slot) free_slots_.push_back(slot);
  for (uint32_t slot = settings_.send_depth; slot < slots; ++slot) {
    if (!PostReceive(slot)) Throw("cannot post a receive", errno);
  }
}

void Endpoint::Attach(rdma_cm_id* id, int peer_mtu) {
  std::lock_guard<std::mutex> lock(mu_);
  if (state_ == State::kClosed) throw dmlc::Error("the endpoint was closed");
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
    if (state_ == State::kClosed) return;
    // What the peer sent may have come before the news that it is there.
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

void Endpoint::CloseWhenFlushed() {
  Turn turn;
  {
    std::lock_guard<std::mutex> lock(mu_);
    goodbye_wanted_ = close_when_flushed_ = true;
    Pump(&turn);
    CloseIfFlushed(&turn);
  }
  Finish(&turn);
}

void Endpoint::CloseIfFlushed(Turn* turn) {
  if (!close_when_flushed_ || state_ != State::kOpen || !goodbye_sent_) return;
  if (free_slots_.size() == sending_.size()) Close("this node closed it", turn);
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
  // What lets the peer go on goes first, new messages last.  What is posted leaves in
  // order, however long it takes: so no more is than keeps the link busy.  A CTS behind
  // all values that wait would let the other direction run dry.
  while (!ctss_.empty() && CanSend() && state_ == State::kOpen) SendCts(turn);
  while (MayWrite() && CanSend() && state_ == State::kOpen) WriteNext(turn);
  while (!outbox_.empty() && CanSend() && state_ == State::kOpen) SendNext(turn);
  const bool silent = outbox_.empty() && requested_.empty() && writes_.empty();
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
    SendFrame(kRts, id, message.get(), nullptr, turn);
    requested_[id] = std::move(message);
    return;
  }
  queued_bytes_ -= message->bytes();
  ++counters_->messages_sent;
  counters_->bytes_sent += message->bytes();
  SendFrame(kMessage, 0, message.get(), nullptr, turn);
  turn->done.push_back(std::move(message));  // all of it was copied
}

void Endpoint::SendCts(Turn* turn) {
  Incoming& incoming = incoming_.at(ctss_.front());
  Target target;
  target.address = reinterpret_cast<uintptr_t>(incoming.memory.bytes.data());
  target.rkey = incoming.memory.rkey;
  target.cookie = ctss_.front();
  ctss_.pop_front();
  incoming.is_cleared = true;
  SendFrame(kCts, incoming.id, nullptr, &target, turn);
}

void Endpoint::SendFrame(FrameType type, uint32_t id, const Outgoing* content, const Target* target,
                         Turn* turn) {
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  char* const frame = SlotOf(slot);
  char* at = frame;
  const auto append = [&at](const void* data, size_t bytes) {
    if (bytes > 0) memcpy(at, data, bytes);
    at += bytes;
  };
  FrameHeader header;
  header.type = type;
  header.id = id;
  header.credits = owed_;
  owed_ = 0;
  std::string head;
  if (target != nullptr) head = target->Encode();
  if (content != nullptr) {
    header.values = static_cast<uint8_t>(content->sizes.size());
    header.meta_bytes = static_cast<uint32_t>(content->meta.size());
    header.meta_in_region = content->meta_in_region;
    ByteWriter sizes(&head);
    for (const uint64_t size : content->sizes) sizes.Int(size);
  }
  head = header.Encode() + head;
  append(head.data(), head.size());
  if (content != nullptr) {
    if (!content->meta_in_region) append(content->meta.data(), content->meta.size());
    if (type == kMessage) {
      for (const auto& value : content->values) append(value.data(), value.size());
    }
  }
  sending_[slot].type = type;
  sending_[slot].key = content == nullptr ? 0 : content->key;
  sending_[slot].bytes = 0;

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
  request.imm_data = htonl(message->cookie);
  request.wr.rdma.remote_addr = message->remote_address + message->written;
  request.wr.rdma.rkey = message->remote_key;
  message->written += piece.length;
  posted_bytes_ += piece.length;
  sending_[slot].bytes = piece.length;
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
    CloseFor("a send could not be posted", error, turn);
  }
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

void Endpoint::Close(const std::string& reason, Turn* turn, bool by_peer) {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  turn->closed = true;
  turn->ending = {reason, goodbye_received_, by_peer};
  StopQueuePair();
  // These are known to this side alone.  What was written from, or is written to, stays
  // until the device has given the requests back.
  for (auto& message : outbox_) turn->done.push_back(std::move(message));
  for (auto& request : requested_) turn->done.push_back(std::move(request.second));
  outbox_.clear();
  requested_.clear();
  ctss_.clear();
}

void Endpoint::CloseFor(const char* what, int error, Turn* turn) {
  if (disconnected_) return Close(kClosed, turn, true);
  Close(std::string(what) + ": " + strerror(error), turn);
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
  return Finished();
}

void Endpoint::Finish(Turn* turn) {
  for (auto& parts : turn->received) {
    try {
      if (parts.is_inline) PutInPlace(&parts);
      owner_->OnMessage(this, std::move(parts));
    } catch (const std::exception& e) {
      Fail(e.what());
    }
  }
  if (turn->closed) owner_->OnClosed(this, turn->ending);
}

}  // namespace rdma
}  // namespace ps
