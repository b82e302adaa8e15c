// The endpoint's part that handles completions and what the peer sent.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "./endpoint.h"
#include "dmlc/logging.h"

namespace ps {
namespace rdma {
namespace {

// Completions taken at once.
constexpr int kBatch = 32;

// wr_id: the slot, and whether it is one of receives.
constexpr uint64_t kReceiveFlag = 1ull << 63;

// The device gives requests back though nobody closed the connection.
constexpr char kStopped[] = "the device stopped its queue pair";

[[noreturn]] void BadFrame(const char* what) {
  throw dmlc::Error(std::string("it sent a frame that does not parse (") + what +
                    "): install the same byteps on every node");
}

}  // namespace

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
  posted_bytes_ -= sending.bytes;
  if (wc.status != IBV_WC_SUCCESS && state_ != State::kClosed) {
    if (disconnected_) {
      Close(kClosed, turn, true);
    } else if (wc.status == IBV_WC_WR_FLUSH_ERR) {
      Close(kStopped, turn);
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
    if (disconnected_) {
      Close(kClosed, turn, true);
    } else if (wc.status == IBV_WC_WR_FLUSH_ERR) {
      Close(kStopped, turn);
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
    return CloseFor("a receive could not be posted", errno, turn);
  }
  ++owed_;
}

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

}  // namespace rdma
}  // namespace ps
