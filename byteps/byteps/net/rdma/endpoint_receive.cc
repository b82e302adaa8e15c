// Receiving side of an endpoint: completions, received frames, and memory for values.
#include <arpa/inet.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "byteps/base/wire.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/pool.h"

namespace ps {
namespace rdma {

namespace {

// Completions handled per call.
constexpr int kBatch = 32;

// Reason of a break when the device returned requests although neither side closed the connection.
constexpr char kStopped[] = "the device stopped its queue pair";

[[noreturn]] void BadFrame(const char* what) {
  throw Error(std::string("it sent a frame that does not parse (") + what +
              "): install the same byteps on every node");
}

void ReadMeta(const char* data, size_t bytes, int peer, Meta* meta) {
  const bool parses = DecodeMeta(data, bytes, meta);
  meta->sender = peer;  // the connection's peer, whatever the sender claims
  if (parses) return;
  throw Error("it sent a message whose meta of " + std::to_string(bytes) + " bytes does not parse");
}

}  // namespace

int Endpoint::Arm() {
  MutexLock lock(&mu_);
  return connection_ ? ibv_req_notify_cq(connection_->cq.get(), 0) : 0;
}

bool Endpoint::Poll() {
  ibv_cq* queue = nullptr;
  {
    MutexLock lock(&mu_);
    if (connection_) queue = connection_->cq.get();
  }
  ibv_wc completions[kBatch];
  const int count = queue == nullptr ? 0 : ibv_poll_cq(queue, kBatch, completions);
  Deferred deferred;
  bool any_waits = false;
  {
    MutexLock lock(&mu_);
    polling_thread_ = std::this_thread::get_id();
    std::swap(deferred, later_);
    if (count < 0) Close("its completion queue cannot be read", &deferred);
    for (int i = 0; i < count; ++i) Complete(completions[i], &deferred);
    if (count > 0) {
      Pump(&deferred);
      CloseIfFlushed(&deferred);
    }
    LetGoIfDrained();
    any_waits = inbox_.any_waits();
  }
  if (count > 0) cond_.NotifyAll();
  if (any_waits) ClearWaiting();
  Finish(&deferred);
  MutexLock lock(&mu_);
  return count > 0 || !later_.is_empty();
}

void Endpoint::Complete(const ibv_wc& wc, Deferred* deferred) {
  if (wc.wr_id & kReceiveFlag) {
    CompleteReceive(wc, deferred);
  } else {
    CompleteSend(wc, deferred);
  }
}

void Endpoint::CompleteSend(const ibv_wc& wc, Deferred* deferred) {
  ++counters_->send_completions;
  PostedSends::Retired retired;
  const bool known = connection_->sends.Retire(wc.wr_id, &retired);
  BPS_INVARIANT_NOTED("what completes was posted", known, "send " + std::to_string(wc.wr_id));
  if (wc.status != IBV_WC_SUCCESS) {
    static const char* const kWhat[] = {
        "an RDMA write",         "a message", "an RTS", "a CTS", "a credit", "a goodbye",
        "what has been received"};
    char key[40] = "";
    const PostedSends::Request& failed = retired.last;
    if (failed.key != 0) {
      snprintf(key, sizeof(key), " of key 0x%llx", static_cast<unsigned long long>(failed.key));
    }
    BreakAfter(wc, "sending " + std::string(kWhat[failed.type]) + key + " failed: ", deferred);
  }
  if (state_ == State::kClosed) {
    if (connection_->sends.empty()) outbox_.TakeSent(&deferred->done);
    return;
  }
  // After a failure only the peer knows whether it has received this message and the unsignalled
  // messages before it.
  if (retired.messages == 0 || wc.status != IBV_WC_SUCCESS) return;
  try {
    outbox_.Arrived(retired.messages, &deferred->done);
  } catch (const std::exception& e) {
    Close(e.what(), deferred);
  }
}

void Endpoint::BreakAfter(const ibv_wc& wc, const std::string& what, Deferred* deferred) {
  if (connection_->disconnected) return BreakOff(kLinkClosed, LinkFault::kClosed, deferred);
  if (wc.status == IBV_WC_WR_FLUSH_ERR) return BreakOff(kStopped, LinkFault::kBroken, deferred);
  const bool silent = wc.status == IBV_WC_RETRY_EXC_ERR;
  BreakOff(what + Describe(wc), silent ? LinkFault::kSilent : LinkFault::kBroken, deferred);
  deferred->path_failed = true;
}

void Endpoint::CompleteReceive(const ibv_wc& wc, Deferred* deferred) {
  const auto slot = static_cast<uint32_t>(wc.wr_id & ~kReceiveFlag);
  --connection_->receives_posted;
  if (wc.status != IBV_WC_SUCCESS) return BreakAfter(wc, "a receive failed: ", deferred);
  if (state_ == State::kClosed) return;
  if (state_ == State::kConnecting) {  // the message comes before the connection's event
    state_ = State::kOpen;
    was_open_ = true;
  }
  try {
    if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
      ReadImmediate(ntohl(wc.imm_data), deferred);
    } else {
      ReadFrame(SlotOf(slot), wc.byte_len, deferred);
    }
  } catch (const std::exception& e) {
    return Close(e.what(), deferred);
  }
  // Messages that arrived before a break still count, but no further message is read.
  if (state_ != State::kOpen) return;
  if (!PostReceive(slot)) return BreakFor("a receive could not be posted", errno, deferred);
  ++connection_->owed;
}

void Endpoint::ReadFrame(const char* frame, uint32_t bytes, Deferred* deferred) {
  connection_->nic->bytes_received += bytes;
  FrameHeader header;
  if (!header.Decode(frame, bytes)) BadFrame("its header");
  const char* body = frame + kFrameHeaderBytes;
  bytes -= kFrameHeaderBytes;
  connection_->credits += header.credits;
  const bool may_come_first = header.type == kResume || header.type == kCredit;
  if (!connection_->resumed && !may_come_first) {
    throw Error("it sent messages before it had said what it has received");
  }
  switch (header.type) {
    case kMessage:
    case kRts:
      return ReadContent(header, body, bytes, deferred);
    case kCts:
      return ReadCts(header, body, bytes);
    case kCredit:
      return;
    case kGoodbye:
      goodbye_.received = true;
      return;
    case kResume:
      return ReadResume(body, bytes, deferred);
    default:
      BadFrame("type");
  }
}

void Endpoint::ReadContent(const FrameHeader& header, const char* body, uint32_t bytes,
                           Deferred* deferred) {
  if (peer() == Node::kEmpty &&
      (header.meta_bytes > kStrangersMetaBytes || header.values > 0 || header.has_offer)) {
    throw Error("it sent values, or a long message, before it was a member of the job");
  }
  const uint32_t meta_here = header.meta_in_region ? 0 : header.meta_bytes;
  const uint32_t sizes_bytes = header.values * sizeof(uint64_t);
  const uint32_t offer_bytes = header.has_offer ? kOfferBytes : 0;
  const uint32_t head_bytes = sizes_bytes + offer_bytes;
  if (bytes < head_bytes || bytes - head_bytes < meta_here) BadFrame("its length");
  std::vector<uint64_t> sizes(header.values);
  ByteReader in(body, sizes_bytes);
  uint64_t total = 0;
  for (uint64_t& size : sizes) {
    in.Int(&size);
    if (size > kMaxValueBytes) BadFrame("the size of a value");
    total += size;
  }
  if (total > kMaxValueBytes) BadFrame("the size of its values");
  body += sizes_bytes;
  Offer offer;
  if (header.has_offer && !offer.Decode(body, kOfferBytes)) BadFrame("an offer");
  body += offer_bytes;
  bytes -= head_bytes + meta_here;
  Received parts;
  parts.bytes = header.meta_bytes + total;
  if (!header.meta_in_region) ReadMeta(body, meta_here, peer(), &parts.msg.meta);
  body += meta_here;
  if (header.has_offer) {
    const Meta& meta = parts.msg.meta;
    if (!meta.request) BadFrame("an offer that no request makes");
    outbox_.Keep(ExchangeOf(meta), offer);
  }
  if (header.type == kMessage) {
    if (bytes != total) BadFrame("the length of its values");
    SArray<char> values;
    values.CopyFrom(body, total);
    parts.msg.data = Split(values, 0, sizes);
    parts.is_inline = true;
    inbox_.Came();
    counters_->values_in_frames += sizes.size();
    counters_->bytes_in_frames += total;
    return Deliver(std::move(parts), deferred);
  }
  if (bytes != 0) BadFrame("its length");
  Incoming incoming;
  incoming.id = header.id;
  incoming.parts = std::move(parts);
  incoming.sizes = std::move(sizes);
  incoming.value_bytes = total;
  incoming.meta_in_region = header.meta_in_region ? header.meta_bytes : 0;
  if (incoming.bytes() == 0) BadFrame("it requests to send nothing");
  if (!header.takes_offer) return inbox_.Wait(std::move(incoming));
  const Exchange exchange = ExchangeOf(incoming.parts.msg.meta);
  if (!inbox_.BeginOffered(exchange, header.id, std::move(incoming))) {
    BadFrame("an answer to a place that was not offered");
  }
}

void Endpoint::ReadCts(const FrameHeader& header, const char* body, uint32_t bytes) {
  Target target;
  if (!target.Decode(body, bytes)) BadFrame("a CTS");
  if (!outbox_.Answered(header.id, target)) BadFrame("a CTS that was not asked for");
}

void Endpoint::ReadImmediate(uint32_t cookie, Deferred* deferred) {
  Incoming incoming;
  if (!inbox_.Take(cookie, &incoming)) BadFrame("a write that was not cleared");
  inbox_.Came();
  connection_->nic->bytes_received += incoming.bytes();
  if (incoming.drop) return;
  SArray<char> values = incoming.memory.bytes;
  const uint32_t meta = incoming.meta_in_region;
  if (meta > 0) ReadMeta(values.data(), meta, peer(), &incoming.parts.msg.meta);
  if (incoming.memory.region) {
    counters_->values_in_place += incoming.sizes.size();
    counters_->bytes_in_place += incoming.value_bytes;
    if (incoming.was_offered) ++counters_->values_offered;
  } else {
    counters_->values_in_pool += incoming.sizes.size();
    counters_->bytes_in_pool += incoming.value_bytes;
    if (incoming.place != nullptr) {  // the device could not write to the destination
      memcpy(incoming.place, values.data(), incoming.value_bytes);
      values.reset(incoming.place, incoming.value_bytes, [](char*) {});
    }
  }
  incoming.parts.msg.data = Split(values, AlignUp(meta, kRegionAlign), incoming.sizes);
  Deliver(std::move(incoming.parts), deferred);
}

void Endpoint::Deliver(Received parts, Deferred* deferred) {
  ++counters_->messages_received;
  counters_->bytes_received += parts.bytes;
  if (!parts.msg.meta.request) inbox_.EndOffer(ExchangeOf(parts.msg.meta));
  deferred->received.push_back(std::move(parts));
}

// Copies a small value to its destination, so that the receiver finds all values there.
void Endpoint::PutInPlace(Received* received) {
  auto& values = received->msg.data;
  if (values.size() != 1 || values[0].size() == 0) return;
  const size_t bytes = values[0].size();
  MutexLock lock(&place_mu_);
  char* place = owner_->PlaceFor(this, received->msg.meta, bytes);
  if (place == nullptr) return;
  memcpy(place, values[0].data(), bytes);
  values[0].reset(place, bytes, [](char*) {});
}

// ----- memory for values, and abandoning it

namespace {

// Time for a device to return requests after its queue pair was stopped.
constexpr auto kLastCompletions = std::chrono::seconds(2);
constexpr auto kLook = std::chrono::microseconds(100);

}  // namespace

// ---------------------------------------------------------- finding memory

bool Endpoint::MayClear() const {
  return state_ == State::kOpen && inbox_.MayClear(settings_.receive_window_bytes);
}

void Endpoint::ClearWaiting() {
  while (true) {
    {
      MutexLock lock(&mu_);
      if (!MayClear()) return;
      inbox_.BeginClearing();
    }
    if (ClearFirst(false)) continue;
    // The first message needs memory that must be registered. The messages behind it wait.
    auto self = shared_from_this();
    return resources_.registrar->Post([self] { self->ClearSlowly(); });
  }
}

void Endpoint::ClearSlowly() {
  try {
    ClearFirst(true);
  } catch (const std::exception& e) {
    return Fail(e.what());
  }
  ClearWaiting();
}

bool Endpoint::ClearFirst(bool may_block) {
  Deferred deferred;
  while (true) {
    Incoming* first = nullptr;
    char* place = nullptr;
    {
      MutexLock place_lock(&place_mu_);
      MutexLock lock(&mu_);
      first = inbox_.first();
      if (!first->asked) {
        const bool is_one_value = first->sizes.size() == 1 && first->meta_in_region == 0;
        lock.Unlock();  // the owner of the memory may hold its own lock while it sends
        if (is_one_value) place = owner_->PlaceFor(this, first->parts.msg.meta, first->value_bytes);
        lock.Lock();
        first->asked = true;
        first->place = place;
      }
      place = first->place;
    }
    Memory memory;
    const Region* region = nullptr;
    if (!FindMemory(*first, place, may_block, &memory, &region)) return false;
    MutexLock lock(&mu_);
    // Without a place, the operation was abandoned in the meantime.
    if (memory.region && first->place == nullptr) continue;
    // The memory stays while this message is being cleared.
    memory.rkey = region->rkey(*connection_->device);
    inbox_.EndClearing(std::move(memory));
    Pump(&deferred);
    break;
  }
  Finish(&deferred);
  return true;
}

bool Endpoint::FindMemory(const Incoming& incoming, char* place, bool may_block, Memory* memory,
                          const Region** region) {
  if (place != nullptr) {
    memory->region = RegionToReceive(place, incoming.value_bytes, may_block, resources_.devices);
    if (memory->region) {
      memory->bytes.reset(place, incoming.value_bytes, [](char*) {});
      *region = memory->region.get();
      return true;
    }
    if (!may_block) return false;
  }
  Pool::Buffer buffer;
  if (may_block) {
    buffer = resources_.pool->Take(incoming.bytes());
  } else if (!resources_.pool->TakeIdle(incoming.bytes(), &buffer)) {
    return false;
  }
  memory->bytes = buffer.bytes;
  *region = buffer.region;
  return true;
}

// ------------------------------------------------------------ giving it up

// Clang cannot see that mu_ is the lock that done() requires.
template <typename Done>
bool Endpoint::Await(Clock::time_point deadline, Done done) PS_NO_THREAD_SAFETY_ANALYSIS {
  // If the polling thread itself calls this, it must poll here. It reports completions only after
  // the return, because the caller, which owns the memory, must not be called back during its own
  // call.
  const bool polls = std::this_thread::get_id() == polling_thread_;
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    if (!polls) {
      // The wait is ended by completions, which the polling thread reports; deadline: the caller's.
      cond_.WaitUntil(&mu_, deadline);
      continue;
    }
    int count = 0;
    if (connection_) {
      ibv_wc completions[kBatch];
      count = ibv_poll_cq(connection_->cq.get(), kBatch, completions);
      for (int i = 0; i < count; ++i) Complete(completions[i], &later_);
      Pump(&later_);
      LetGoIfDrained();
    }
    cond_.NotifyAll();
    if (count > 0) continue;
    mu_.Unlock();
    // The wait is ended by the time; deadline: kLook.
    std::this_thread::sleep_for(kLook);
    mu_.Lock();
  }
  return true;
}

void Endpoint::Abandon(const void* begin, size_t bytes, Clock::time_point deadline) {
  const char* first = static_cast<const char*>(begin);
  MutexLock place_lock(&place_mu_);
  MutexLock lock(&mu_);
  place_lock.Unlock();  // from now on, PlaceFor knows that the memory is abandoned
  outbox_.Withdraw(first, bytes);
  const bool moved = inbox_.Abandon(first, bytes);
  if (moved) {
    lock.Unlock();
    ClearWaiting();
    lock.Lock();
  }
  const auto done = [&]() PS_REQUIRES(mu_) {
    return !inbox_.IsWrittenTo(first, bytes) || Finished();
  };
  const bool is_offered = inbox_.IsOffered(first, bytes);
  if (!is_offered && Await(deadline, done)) return;
  Deferred deferred;
  BreakOff(is_offered ? "memory was given up that had been offered for an answer"
                      : "a value in flight to memory that was given up did not come in time",
           LinkFault::kBroken, &deferred);
  lock.Unlock();
  Finish(&deferred);
  lock.Lock();
  if (Await(Clock::now() + kLastCompletions, done)) return;
  BPS_LOG(WARNING) << "an RDMA device keeps receives after their end";
}

}  // namespace rdma
}  // namespace ps
