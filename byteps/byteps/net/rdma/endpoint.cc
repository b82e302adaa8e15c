#include "byteps/net/rdma/endpoint.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/wire_bytes.h"
#include "dmlc/logging.h"

namespace ps {
namespace rdma {
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
  connection_.reset();
}

void Endpoint::Open() {
  Turn turn;
  {
    MutexLock lock(&mu_);
    // What the peer sent may have come before the news that it is there.
    if (state_ != State::kConnecting || !connection_) return;
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
    MutexLock lock(&mu_);
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
    MutexLock lock(&mu_);
    goodbye_wanted_ = true;
    Pump(&turn);
  }
  Finish(&turn);
}

void Endpoint::CloseWhenFlushed() {
  Turn turn;
  {
    MutexLock lock(&mu_);
    goodbye_wanted_ = close_when_flushed_ = true;
    // Nothing will flush it.
    if (in_outage_ && state_ != State::kOpen) Close("this node closed it", &turn);
    Pump(&turn);
    CloseIfFlushed(&turn);
  }
  Finish(&turn);
}

void Endpoint::CloseIfFlushed(Turn* turn) {
  if (!close_when_flushed_ || state_ != State::kOpen || !goodbye_sent_) return;
  if (connection_->sends_completed()) Close("this node closed it", turn);
}

bool Endpoint::flushed() {
  MutexLock lock(&mu_);
  if (state_ != State::kOpen) return true;
  return goodbye_sent_ && connection_->sends_completed();
}

bool Endpoint::all_arrived() {
  MutexLock lock(&mu_);
  if (state_ == State::kClosed) return true;
  return state_ == State::kOpen && outbox_.empty() && requested_.empty() && writes_.empty() &&
         connection_->sends_completed();
}

LinkLoad Endpoint::load() {
  MutexLock lock(&mu_);
  return {state_ == State::kOpen, state_ == State::kClosed, queued_bytes_};
}

void Endpoint::Pump(Turn* turn) {
  if (state_ != State::kOpen) return;
  if (!connection_->told_received && CanSend()) SendResume(turn);
  // What the peer has got must not be sent to it once more.
  if (state_ != State::kOpen || !connection_->resumed) return;
  // What lets the peer go on goes first, new messages last.  What is posted leaves in
  // order, however long it takes: so no more is than keeps the link busy.  A CTS behind
  // all values that wait would let the other direction run dry.
  while (!ctss_.empty() && CanSend()) SendCts(turn);
  while (CanSend() && MayWrite()) WriteNext(turn);
  while (!outbox_.empty() && CanSend()) SendNext(turn);
  const bool silent = outbox_.empty() && requested_.empty() && writes_.empty();
  if (goodbye_wanted_ && !goodbye_sent_ && silent && CanSend()) {
    goodbye_sent_ = true;
    SendBare(kGoodbye, turn);
  }
  if (state_ != State::kOpen) return;
  const bool owes_much = connection_->owed >= settings_.receive_depth / 2;
  if (owes_much && connection_->credits > 0 && !connection_->free_slots.empty()) {
    SendBare(kCredit, turn);
  }
}

void Endpoint::SendNext(Turn* turn) {
  OutgoingPtr message = std::move(outbox_.front());
  outbox_.pop_front();
  FrameHeader header;
  header.type = message->in_region ? kRts : kMessage;
  if (message->in_region) header.id = ++last_id_;
  header.values = static_cast<uint8_t>(message->sizes.size());
  header.meta_bytes = static_cast<uint32_t>(message->meta.size());
  header.meta_in_region = message->meta_in_region;
  std::string sizes;
  ByteWriter out(&sizes);
  for (const uint64_t size : message->sizes) out.Int(size);
  Sending* const sending = SendFrame(header, sizes, message.get(), turn);
  if (sending == nullptr) {
    if (state_ == State::kClosed) {
      turn->done.push_back(std::move(message));
    } else {
      outbox_.push_front(std::move(message));
    }
  } else if (message->in_region) {
    requested_[header.id] = std::move(message);
  } else {
    Sent(sending, std::move(message));
  }
}

void Endpoint::Sent(Sending* sending, OutgoingPtr message) {
  PS_INVARIANT_NOTED("bytes queued are those of the messages queued",
                     queued_bytes_ >= message->bytes(),
                     std::to_string(message->bytes()) + " of " + std::to_string(queued_bytes_));
  queued_bytes_ -= message->bytes();
  if (!message->is_counted) {
    message->is_counted = true;
    ++counters_->messages_sent;
    counters_->bytes_sent += message->bytes();
  }
  sending->ends_message = true;
  log_.Add(std::move(message));
}

void Endpoint::SendCts(Turn* turn) {
  Incoming& incoming = incoming_.at(ctss_.front());
  Target target;
  target.address = reinterpret_cast<uintptr_t>(incoming.memory.bytes.data());
  target.rkey = incoming.memory.rkey;
  target.cookie = ctss_.front();
  ctss_.pop_front();
  incoming.is_cleared = true;
  FrameHeader header;
  header.type = kCts;
  header.id = incoming.id;
  SendFrame(header, target.Encode(), nullptr, turn);
}

void Endpoint::SendBare(FrameType type, Turn* turn) {
  FrameHeader header;
  header.type = type;
  SendFrame(header, "", nullptr, turn);
}

Endpoint::Sending* Endpoint::SendFrame(FrameHeader header, const std::string& body,
                                       const Outgoing* content, Turn* turn) {
  Connection* const connection = connection_.get();
  const uint32_t slot = connection->free_slots.back();
  connection->free_slots.pop_back();
  char* const frame = SlotOf(slot);
  char* at = frame;
  const auto append = [&at](const void* data, size_t bytes) {
    if (bytes > 0) memcpy(at, data, bytes);
    at += bytes;
  };
  header.credits = std::exchange(connection->owed, 0);
  const std::string head = header.Encode() + body;
  append(head.data(), head.size());
  if (content != nullptr) {
    if (!content->meta_in_region) append(content->meta.data(), content->meta.size());
    if (header.type == kMessage) {
      for (const auto& value : content->values) append(value.data(), value.size());
    }
  }
  Sending* const sending = &connection->sending[slot];
  sending->type = header.type;
  sending->key = content == nullptr ? 0 : content->key;
  sending->bytes = 0;

  ibv_sge piece;
  piece.addr = reinterpret_cast<uintptr_t>(frame);
  piece.length = static_cast<uint32_t>(at - frame);
  piece.lkey = connection->slots_region->lkey();
  ibv_send_wr request;
  memset(&request, 0, sizeof(request));
  request.wr_id = slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  PS_INVARIANT_NOTED("credits are never below zero", connection->credits > 0,
                     "a frame of type " + std::to_string(header.type));
  --connection->credits;
  return PostSend(&request, turn) ? sending : nullptr;
}

void Endpoint::WriteNext(Turn* turn) {
  Connection* const connection = connection_.get();
  Outgoing* message = writes_.front().get();
  const uint32_t slot = connection->free_slots.back();
  connection->free_slots.pop_back();
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
  Sending* const sending = &connection->sending[slot];
  sending->bytes = piece.length;
  sending->type = 0;
  sending->key = message->key;
  if (!PostSend(&request, turn)) return;
  message->written += piece.length;
  connection->posted_bytes += piece.length;
  PS_INVARIANT_NOTED("a window is within its limit",
                     connection->posted_bytes <= settings_.window_bytes,
                     std::to_string(connection->posted_bytes) + " bytes are being written, of " +
                         std::to_string(settings_.window_bytes));
  if (!last) return;
  --connection->credits;  // the immediate takes a slot
  OutgoingPtr whole = std::move(writes_.front());
  writes_.pop_front();
  Sent(sending, std::move(whole));
}

bool Endpoint::PostSend(ibv_send_wr* request, Turn* turn) {
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(connection_->qp.get(), request, &bad);
  if (error == 0) return true;
  connection_->free_slots.push_back(static_cast<uint32_t>(request->wr_id));
  BreakFor("a send could not be posted", error, turn);
  return false;
}

// ----------------------------------------------------------------- ending

void Endpoint::Fail(const std::string& reason) {
  Turn turn;
  {
    MutexLock lock(&mu_);
    Close(reason, &turn);
  }
  Finish(&turn);
}

void Endpoint::Close(const std::string& reason, Turn* turn, bool by_peer) {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  turn->closed = true;
  turn->ending = {reason, by_peer, goodbye_received_};
  StopQueuePair();
  // These are known to this side alone.  What was written from, or is written to, stays
  // until the device has given the requests back.
  for (auto& message : outbox_) turn->done.push_back(std::move(message));
  for (auto& request : requested_) turn->done.push_back(std::move(request.second));
  if (!connection_ || connection_->reads_no_message()) LetGoOfLog(turn);
  outbox_.clear();
  requested_.clear();
  ctss_.clear();
}

void Endpoint::LetGoOfLog(Turn* turn) {
  for (auto& message : log_.TakeAll()) turn->done.push_back(std::move(message));
}

bool Endpoint::closed() {
  MutexLock lock(&mu_);
  return state_ == State::kClosed;
}

bool Endpoint::was_open() {
  MutexLock lock(&mu_);
  return was_open_;
}

bool Endpoint::finished() {
  MutexLock lock(&mu_);
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
  if (turn->resumed) owner_->OnResumed(this, turn->after, turn->again);
  if (turn->broken) owner_->OnBroken(this);
  if (turn->closed) owner_->OnClosed(this, turn->ending);
}

}  // namespace rdma
}  // namespace ps
