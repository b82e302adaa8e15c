// An endpoint's connections: how they are made, and how they end.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/mutex.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/rdma/endpoint.h"
#include "byteps/net/rdma/verbs.h"

namespace ps {
namespace rdma {
namespace {

// Retries if a receiver has no slot, which should never happen.
constexpr int kReceiverNotReadyTries = 6;
constexpr int kReceiverNotReadyTimer = 12;  // 0.64 ms
// A lost acknowledgement times out after 4.096 us * 2^18 = 1.1 s, and is retried kTries times. So a
// silent peer is noticed after about 8 s, unless heartbeats notice it earlier. kTries is not 7,
// because Soft-RoCE takes 7 as unlimited.
constexpr int kAckTimer = 18;
constexpr int kTries = 6;
constexpr auto kSilence = std::chrono::seconds(8);
// Half of kAckTimer's time, for a link that can move to another pair of NICs.
constexpr int kAckTimerToMove = kAckTimer - 1;
constexpr auto kSilenceToMove = kSilence / 2;

// Size of an RTS, CTS or credit frame with its header.
constexpr uint32_t kInlineBytes = 192;

// Number of pieces per window in which values are written.
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

Endpoint::Connection::Connection(const Path& path, uint32_t depth, uint64_t window)
    : device(path.device),
      may_move(path.may_move),
      nic(CountersOfNic(Address::Of(rdma_get_local_addr(path.id)).Host())),
      nics(Address::Of(rdma_get_local_addr(path.id)).Host() + " to " +
           Address::Of(rdma_get_peer_addr(path.id)).Host()),
      nics_key(std::hash<std::string>()(nics)),
      sends(depth, window) {
  // A write consists of whole pages, so that no packet between two writes is short.
  const uint64_t most = std::min<uint64_t>(device->max_message_bytes(), window / kPieces);
  max_write = static_cast<uint32_t>(most / 4096 * 4096);
}

void Endpoint::FreeSlots::operator()(char* memory) const { free(memory); }

// ----------------------------------------------------------------- making a connection

bool Endpoint::MayConnect() {
  MutexLock lock(&mu_);
  return state_ == State::kConnecting && (!connection_ || !connection_->attached);
}

bool Endpoint::NeedsConnection() {
  MutexLock lock(&mu_);
  if (!outage_.lasts() || state_ == State::kClosed || state_ == State::kOpen) return false;
  return state_ == State::kBroken || !connection_ || !connection_->attached;
}

std::unique_ptr<Endpoint::Connection> Endpoint::MakeConnection(const Path& path) {
  auto made = std::make_unique<Connection>(path, settings_.send_depth, settings_.window_bytes);
  const Device& device = *made->device;
  const uint32_t slots = settings_.send_depth + settings_.receive_depth;
  const size_t bytes = AlignUp(static_cast<uint64_t>(slots) * slot_bytes_, 4096);
  made->slots.reset(static_cast<char*>(aligned_alloc(4096, bytes)));
  if (!made->slots) Throw("cannot allocate " + std::to_string(bytes) + " bytes", ENOMEM);
  made->slots_region = std::make_unique<Region>(Devices{made->device}, made->slots.get(), bytes,
                                                IBV_ACCESS_LOCAL_WRITE);

  // The completion queue has room for unsignalled requests too, because failed ones are reported.
  const uint32_t sends = settings_.send_depth + PostedSends::kReserved;
  const auto completions = static_cast<int>(sends + settings_.receive_depth + 1);
  made->cq.reset(ibv_create_cq(device.context(), completions, this, path.channel, 0));
  if (!made->cq) Throw("cannot make a completion queue of " + std::to_string(completions), errno);
  if (int error = ibv_req_notify_cq(made->cq.get(), 0)) {
    Throw("cannot arm a completion queue", error);
  }

  ibv_qp_init_attr init;
  memset(&init, 0, sizeof(init));
  init.qp_context = this;
  init.send_cq = init.recv_cq = made->cq.get();
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = sends;
  init.cap.max_recv_wr = settings_.receive_depth;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  // RTS, CTS and credits are short: the device takes them inline, without reading memory.
  init.cap.max_inline_data = kInlineBytes;
  made->qp.reset(ibv_create_qp(device.pd(), &init));
  if (!made->qp) {  // some devices cannot send inline
    init.cap.max_inline_data = 0;
    made->qp.reset(ibv_create_qp(device.pd(), &init));
  }
  if (!made->qp) Throw("cannot make a queue pair", errno);
  made->inline_bytes = init.cap.max_inline_data;

  int mask = 0;
  ibv_qp_attr attributes = AttributesFor(path.id, IBV_QPS_INIT, &mask);
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  Modify(made->qp.get(), &attributes, mask);
  return made;
}

void Endpoint::Prepare(const Resources& resources, const Path& path) {
  MutexLock lock(&mu_);
  if (state_ == State::kClosed) throw Error("the endpoint was closed");
  if (connection_) throw Error("the last connection is still there");
  resources_ = resources;
  connection_ = MakeConnection(path);
  const uint32_t slots = settings_.send_depth + settings_.receive_depth;
  for (uint32_t slot = settings_.send_depth; slot < slots; ++slot) {
    if (PostReceive(slot)) continue;
    const int error = errno;
    connection_.reset();
    Throw("cannot post a receive", error);
  }
}

void Endpoint::Discard() {
  MutexLock lock(&mu_);
  if (state_ != State::kConnecting || !connection_ || connection_->attached) return;
  state_ = State::kBroken;
  StopQueuePair();
}

bool Endpoint::prepared() {
  MutexLock lock(&mu_);
  return connection_ != nullptr;
}

uint32_t Endpoint::queue_pair_number() {
  MutexLock lock(&mu_);
  if (!connection_) throw Error("the endpoint was closed");
  return connection_->qp->qp_num;
}

void Endpoint::Attach(rdma_cm_id* id, int peer_mtu) {
  MutexLock lock(&mu_);
  if (state_ == State::kClosed) throw Error("the endpoint was closed");
  if (state_ != State::kConnecting || !connection_) throw Error("the connection broke");
  connection_->attached = true;
  ibv_qp* const qp = connection_->qp.get();
  int mask = 0;
  // The attributes are set again, because the connection manager may not have known all before.
  ibv_qp_attr attributes = AttributesFor(id, IBV_QPS_INIT, &mask);
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  Modify(qp, &attributes, mask);

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
    if (settings_.choice.gid_index >= 0) {
      attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(settings_.choice.gid_index);
    }
  }
  Modify(qp, &attributes, mask);

  attributes = AttributesFor(id, IBV_QPS_RTS, &mask);
  attributes.timeout = connection_->may_move ? kAckTimerToMove : kAckTimer;
  attributes.retry_cnt = kTries;
  attributes.rnr_retry = kReceiverNotReadyTries;
  Modify(qp, &attributes, mask | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
}

void Endpoint::SetPeerSlots(uint32_t slots) {
  MutexLock lock(&mu_);
  if (connection_) connection_->credits += slots;
}

bool Endpoint::PostReceive(uint32_t slot) {
  ibv_sge piece;
  piece.addr = reinterpret_cast<uintptr_t>(SlotOf(slot));
  piece.length = slot_bytes_;
  piece.lkey = connection_->slots_region->lkey(*connection_->device);
  ibv_recv_wr request;
  memset(&request, 0, sizeof(request));
  request.wr_id = slot | kReceiveFlag;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  if (int error = ibv_post_recv(connection_->qp.get(), &request, &bad)) {
    errno = error;
    return false;
  }
  ++connection_->receives_posted;
  return true;
}

// ------------------------------------------------------------- broken connections

void Endpoint::Disconnected() {
  MutexLock lock(&mu_);
  if (!connection_ || connection_->disconnected) return;
  if (state_ == State::kClosed || state_ == State::kBroken) return;
  connection_->disconnected = true;
  // The device then returns all requests, but first reports what it has received.
  StopQueuePair();
}

void Endpoint::StopQueuePair() {
  if (!connection_) return;
  ibv_qp_attr attributes;
  memset(&attributes, 0, sizeof(attributes));
  attributes.qp_state = IBV_QPS_ERR;
  const int error = ibv_modify_qp(connection_->qp.get(), &attributes, IBV_QP_STATE);
  if (error != 0) BPS_LOG(WARNING) << "cannot stop a queue pair: " << strerror(error);
  // The device returns incomplete requests, but not complete ones that were not signalled.
  connection_->sends.SignalAll();
  if (!connection_->sends.ends_unsignalled()) return;
  const int refused = PostNothing();
  if (refused != 0 && error == 0) {
    BPS_LOG(WARNING) << "cannot learn what a stopped queue pair has done: " << strerror(refused);
  }
}

void Endpoint::Break(const std::string& reason, LinkFault fault) {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    BreakOff(reason, fault, &deferred);
  }
  Finish(&deferred);
}

bool Endpoint::Leave(const std::string& reason) {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    if (state_ != State::kOpen || goodbye_.received || goodbye_.wanted) return false;
    if (owner_->Patience(this, LinkFault::kBroken) <= Clock::duration::zero()) return false;
    BreakOff(reason, LinkFault::kBroken, &deferred);
  }
  Finish(&deferred);
  return true;
}

std::string Endpoint::path() {
  MutexLock lock(&mu_);
  const bool moves = connection_ && connection_->may_move;
  return moves ? connection_->nics : "";
}

void Endpoint::BreakFor(const char* what, int error, Deferred* deferred) {
  if (connection_->disconnected) return BreakOff(kLinkClosed, LinkFault::kClosed, deferred);
  BreakOff(std::string(what) + ": " + strerror(error), LinkFault::kBroken, deferred);
}

void Endpoint::BreakOff(const std::string& reason, LinkFault fault, Deferred* deferred) {
  if (state_ == State::kClosed || state_ == State::kBroken) return;
  if (!outage_.lasts()) {
    Clock::duration patience{};
    const bool in_order = goodbye_.received || goodbye_.wanted;
    if (state_ == State::kOpen && !in_order) patience = owner_->Patience(this, fault);
    const bool by_peer = fault == LinkFault::kClosed;
    if (patience <= Clock::duration::zero()) return Close(reason, deferred, by_peer);
    // The silence that led to this fault counts towards the time that the peer has to reconnect.
    auto counted = Clock::duration::zero();
    if (fault == LinkFault::kSilent) {
      const bool moves = connection_ && connection_->may_move;
      counted = std::min<Clock::duration>(moves ? kSilenceToMove : kSilence, patience / 2);
    }
    outage_.Begin(reason, fault, by_peer, patience, counted);
  }
  if (!connection_) return;
  // The peer may consider the connection established even if this side does not.
  deferred->broken = deferred->broken || connection_->attached;
  state_ = State::kBroken;
  StopQueuePair();
}

void Endpoint::LetGoIfDrained() {
  // The first message must stay while a thread looks for memory for it.
  if (state_ != State::kBroken || inbox_.is_clearing() || !connection_->drained()) return;
  connection_.reset();
  state_ = State::kConnecting;
  inbox_.Forget();
  outbox_.Interrupt();
  cond_.NotifyAll();
}

Endpoint::Clock::time_point Endpoint::resume_deadline() {
  MutexLock lock(&mu_);
  const bool waits = outage_.lasts() && state_ != State::kClosed;
  return waits ? outage_.deadline() : Clock::time_point::max();
}

void Endpoint::GiveUp(const std::string& last_error, bool listener_gone) {
  Deferred deferred;
  {
    MutexLock lock(&mu_);
    if (!outage_.lasts()) return;
    Close(outage_.GivenUp(listener_gone, last_error), &deferred, outage_.by_peer());
  }
  Finish(&deferred);
}

// --------------------------------------------------------- resumed connections

void Endpoint::SendResume(Deferred* deferred) {
  connection_->told_received = true;
  Resume resume;
  resume.received = inbox_.received();
  FrameHeader header;
  header.type = kResume;
  SendFrame(header, resume.Encode(), nullptr, deferred);
}

void Endpoint::ReadResume(const char* body, uint32_t bytes, Deferred* deferred) {
  Resume resume;
  if (!resume.Decode(body, bytes) || connection_->resumed) {
    throw Error("it sent a frame that does not parse (what it has received)");
  }
  connection_->resumed = true;
  outbox_.Resume(resume.received, &deferred->done);
  if (!outage_.lasts() || state_ != State::kOpen) return;
  deferred->again = outbox_.TakeBegunAgain();
  // The message came over the new connection, so the connection works.
  outage_.AwaitProof(deferred->again);
  deferred->after = outage_.End();
  deferred->resumed = true;
}

}  // namespace rdma
}  // namespace ps
