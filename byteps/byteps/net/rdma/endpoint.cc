#include "byteps/net/rdma/endpoint.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/wire.h"

namespace ps {
namespace rdma {
namespace {

// Values of at least this size are freed as soon as they have arrived.
constexpr uint64_t kLargeBytes = 64 << 10;

}  // namespace

Endpoint::Endpoint(EndpointOwner* owner, Plane plane, int index, bool active,
                   const Settings& settings, std::shared_ptr<EndpointCounters> counters)
    : owner_(owner),
      plane_(plane),
      index_(index),
      active_(active),
      settings_(settings),
      slot_bytes_(settings.slot_bytes()),
      counters_(std::move(counters)),
      outage_(settings.reconnect_s) {}

Endpoint::~Endpoint() {
  // The connection is destroyed first. Then the device no longer accesses the messages' memory.
  connection_.reset();
}

void Endpoint::Open() {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    // The peer's first message may arrive before the event that establishes the connection.
    if (state_ != State::kConnecting || !connection_) return;
    state_ = State::kOpen;
    was_open_ = true;
    Pump(&deferred);
  }
  Finish(&deferred);
}

// ---------------------------------------------------------------- sending

void Endpoint::Send(OutgoingPtr message) {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    if (state_ == State::kClosed) return;
    outbox_.Push(std::move(message));
    Pump(&deferred);
  }
  Finish(&deferred);
}

void Endpoint::SayGoodbye() {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    goodbye_.wanted = true;
    Pump(&deferred);
  }
  Finish(&deferred);
}

void Endpoint::CloseWhenFlushed() {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    goodbye_.wanted = goodbye_.closes = true;
    // Without a connection there is no flush to wait for.
    if (outage_.lasts() && state_ != State::kOpen) Close("this node closed it", &deferred);
    Pump(&deferred);
    CloseIfFlushed(&deferred);
  }
  Finish(&deferred);
}

void Endpoint::CloseIfFlushed(Deferred* deferred) {
  if (!goodbye_.closes || state_ != State::kOpen || !goodbye_.sent) return;
  if (connection_->sends.empty()) Close("this node closed it", deferred);
}

bool Endpoint::flushed() {
  MutexLock lock(&mu_);
  if (state_ != State::kOpen) return true;
  return goodbye_.sent && connection_->sends.empty();
}

bool Endpoint::all_arrived() {
  MutexLock lock(&mu_);
  if (state_ == State::kClosed) return true;
  return state_ == State::kOpen && outbox_.all_arrived();
}

LinkLoad Endpoint::load() {
  MutexLock lock(&mu_);
  LinkLoad load = {state_ == State::kOpen, state_ == State::kClosed, outbox_.bytes()};
  if (connection_) {
    load.in_flight_bytes = connection_->sends.bytes();
    load.nics = connection_->nics_key;
  }
  return load;
}

void Endpoint::Pump(Deferred* deferred) {
  if (state_ != State::kOpen) return;
  if (!connection_->told_received && CanSend()) SendResume(deferred);
  // Messages that the peer already has must not be sent again.
  if (state_ != State::kOpen || !connection_->resumed) return;
  // Requests leave in the order in which they are posted. Frames that let the peer continue are
  // posted first, new messages last. Values are posted only as far as they keep the link busy: a
  // CTS behind all waiting values would starve the other direction.
  while (inbox_.any_to_tell() && CanSend()) SendCts(deferred);
  while (CanSend() && MayWrite()) WriteNext(deferred);
  while (outbox_.has_next() && CanSend()) {
    SendNext(deferred);
    // Writes values to destinations that the peer has offered.
    while (CanSend() && MayWrite()) WriteNext(deferred);
  }
  if (goodbye_.wanted && !goodbye_.sent && outbox_.empty() && CanSend()) {
    goodbye_.sent = true;
    // The connection may be closed when its last request is complete.
    connection_->sends.SignalAll();
    SendBare(kGoodbye, deferred);
  }
  if (state_ != State::kOpen) return;
  const bool owes_much = connection_->owed >= settings_.receive_depth / 2;
  if (owes_much && connection_->credits > 0 && connection_->sends.has_room()) {
    SendBare(kCredit, deferred);
  }
}

void Endpoint::SendNext(Deferred* deferred) {
  OutgoingPtr message = outbox_.TakeNext();
  Offer taken;
  FrameHeader header;
  header.type = message->in_region ? kRts : kMessage;
  header.takes_offer = TakeOffer(*message, &taken);
  if (message->in_region) header.id = header.takes_offer ? taken.target.cookie : outbox_.NewId();
  header.values = static_cast<uint8_t>(message->sizes.size());
  header.meta_bytes = static_cast<uint32_t>(message->meta.size());
  header.meta_in_region = message->meta_in_region;
  std::string sizes;
  ByteWriter out(&sizes);
  for (const uint64_t size : message->sizes) out.Int(size);
  if (message->place.begin != nullptr && !message->meta_in_region) {
    header.has_offer = true;
    const uint32_t rkey = message->place.region->rkey(*connection_->device);
    sizes += inbox_.MakeOffer(message->exchange, message->place, rkey).Encode();
  }
  if (!SendFrame(header, sizes, message.get(), deferred)) {
    if (state_ == State::kClosed) {
      deferred->done.push_back(std::move(message));
    } else {
      outbox_.PutBack(std::move(message));
    }
    return;
  }
  message->place = {};  // the peer knows the destination already, or needs none
  if (header.takes_offer) {
    outbox_.WriteTo(taken.target, std::move(message));
  } else if (message->in_region) {
    outbox_.Asked(header.id, std::move(message));
  } else {
    Sent(std::move(message));
  }
}

bool Endpoint::TakeOffer(const Outgoing& message, Offer* offer) {
  // Each answer consumes its offer.
  if (!message.is_answer || !outbox_.TakeOffer(message.exchange, offer)) return false;
  return message.in_region && !message.meta_in_region && message.sizes.size() == 1 &&
         message.value_bytes == offer->bytes;
}

bool Endpoint::HasOffer(const Exchange& exchange) {
  MutexLock lock(&mu_);
  return state_ == State::kOpen && outbox_.HasOffer(exchange);
}

void Endpoint::Sent(OutgoingPtr message) {
  if (!message->is_counted) {
    message->is_counted = true;
    ++counters_->messages_sent;
    counters_->bytes_sent += message->bytes();
  }
  outbox_.Sent(std::move(message));
}

void Endpoint::SendCts(Deferred* deferred) {
  FrameHeader header;
  header.type = kCts;
  const Target target = inbox_.Tell(&header.id);
  SendFrame(header, target.Encode(), nullptr, deferred);
}

void Endpoint::SendBare(FrameType type, Deferred* deferred) {
  FrameHeader header;
  header.type = type;
  SendFrame(header, "", nullptr, deferred);
}

bool Endpoint::SendFrame(FrameHeader header, const std::string& body, const Outgoing* content,
                         Deferred* deferred) {
  Connection* const connection = connection_.get();
  char* const frame = SlotOf(connection->sends.next_slot());
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
  PostedSends::Request what;
  what.type = header.type;
  what.key = content == nullptr ? 0 : content->key;
  what.ends_message = header.type == kMessage;

  ibv_sge piece;
  piece.addr = reinterpret_cast<uintptr_t>(frame);
  piece.length = static_cast<uint32_t>(at - frame);
  piece.lkey = connection->slots_region->lkey(*connection->device);
  ibv_send_wr request;
  memset(&request, 0, sizeof(request));
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  if (piece.length <= connection->inline_bytes) request.send_flags = IBV_SEND_INLINE;
  BPS_INVARIANT_NOTED("credits are never below zero", connection->credits > 0,
                      "a frame of type " + std::to_string(header.type));
  --connection->credits;
  connection->nic->bytes_sent += piece.length;
  return PostSend(&request, what, deferred);
}

void Endpoint::WriteNext(Deferred* deferred) {
  Connection* const connection = connection_.get();
  Outgoing* const message = outbox_.writing();
  const uint64_t left = message->length - message->written;
  const bool last = left <= connection->max_write;
  ibv_sge piece;
  piece.addr = reinterpret_cast<uintptr_t>(message->address) + message->written;
  piece.length = static_cast<uint32_t>(last ? left : connection->max_write);
  piece.lkey = message->keys->lkey(*connection->device);
  ibv_send_wr request;
  memset(&request, 0, sizeof(request));
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = last ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  request.imm_data = htonl(message->cookie);
  request.wr.rdma.remote_addr = message->remote_address + message->written;
  request.wr.rdma.rkey = message->remote_key;
  PostedSends::Request what;
  what.bytes = piece.length;
  what.key = message->key;
  what.ends_message = last;
  what.is_large = message->length >= kLargeBytes;
  if (!PostSend(&request, what, deferred)) return;
  message->written += piece.length;
  connection->nic->bytes_sent += piece.length;
  BPS_INVARIANT_NOTED("a window is within its limit",
                      connection->sends.bytes() <= settings_.window_bytes,
                      std::to_string(connection->sends.bytes()) + " bytes are being written, of " +
                          std::to_string(settings_.window_bytes));
  if (!last) return;
  --connection->credits;  // a write with an immediate uses one of the peer's slots
  Sent(outbox_.TakeWritten());
}

bool Endpoint::PostSend(ibv_send_wr* request, const PostedSends::Request& what,
                        Deferred* deferred) {
  PostedSends* const sends = &connection_->sends;
  const bool signalled = sends->MustSignal(what);
  request->wr_id = sends->next();
  if (signalled) request->send_flags |= IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (int error = ibv_post_send(connection_->qp.get(), request, &bad)) {
    BreakFor("a send could not be posted", error, deferred);
    return false;
  }
  sends->Add(what, signalled);
  return true;
}

int Endpoint::PostNothing() {
  ibv_send_wr request;
  memset(&request, 0, sizeof(request));
  request.wr_id = connection_->sends.next();
  request.opcode = IBV_WR_RDMA_WRITE;  // for a write of 0 bytes, address and key are ignored
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(connection_->qp.get(), &request, &bad);
  if (error == 0) connection_->sends.Add({}, true);
  return error;
}

bool Endpoint::Watch() {
  MutexLock lock(&mu_);
  return state_ == State::kOpen && connection_->sends.Watch();
}

void Endpoint::AskWhatArrived() {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kOpen || !connection_->sends.EndWatch()) return;
    if (int error = PostNothing()) BreakFor("a send could not be posted", error, &deferred);
  }
  Finish(&deferred);
}

void Endpoint::AskWhetherItWorks() {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kOpen || !connection_->sends.empty()) return;
    if (int error = PostNothing()) BreakFor("a send could not be posted", error, &deferred);
  }
  Finish(&deferred);
}

// ----------------------------------------------------------------- ending

void Endpoint::Fail(const std::string& reason) {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    Close(reason, &deferred);
  }
  Finish(&deferred);
}

void Endpoint::Close(const std::string& reason, Deferred* deferred, bool by_peer) {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  deferred->closed = true;
  deferred->ending = {reason, by_peer, goodbye_.received};
  StopQueuePair();
  // Only this side knows the messages that were not sent, and the requests that were not answered.
  // Memory that the device reads or writes stays until the device has returned its requests.
  outbox_.TakeUnsent(&deferred->done);
  inbox_.StopTelling();
  if (!connection_ || connection_->reads_no_message()) outbox_.TakeSent(&deferred->done);
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

void Endpoint::Finish(Deferred* deferred) {
  for (auto& parts : deferred->received) {
    try {
      if (parts.is_inline) PutInPlace(&parts);
      owner_->OnMessage(this, std::move(parts));
    } catch (const std::exception& e) {
      Fail(e.what());
    }
  }
  if (deferred->resumed) owner_->OnResumed(this, deferred->after, deferred->again);
  if (deferred->broken) owner_->OnBroken(this, deferred->path_failed);
  if (deferred->closed) owner_->OnClosed(this, deferred->ending);
}

}  // namespace rdma
}  // namespace ps
