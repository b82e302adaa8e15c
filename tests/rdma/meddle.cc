// Breaks RDMA inside a process, for tests; loaded by LD_PRELOAD.
//
//   MEDDLE_VERSION=N    connection requests claim wire version N
//   MEDDLE_JOB=N        requests to servers claim job N
//   MEDDLE_RANK=N       requests to servers claim rank N
//   MEDDLE_CLAIM=BYTES  requests to send a value claim this size
//   MEDDLE_TAKE=1       values claim to go to memory that the peer has offered
//   MEDDLE_BREAK=FILE   whenever FILE exists, the queue pairs of the plane that it names ("data" or
//                       "control") fail, as when a NIC gives up on a peer, and FILE is removed
//   MEDDLE_FLIP=1       in every third request of a repeated connection one bit is flipped, in the
//                       request or in its answer, each time another bit
//
// Affects only connections that this process requests.
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "byteps/base/wire.h"
#include "byteps/net/rdma/wire.h"

namespace {

using ps::rdma::ConnectRequest;

struct QueuePair {
  ibv_qp* qp;
  std::string plane;  // empty until this process requests a connection with this plane
};

// Existing queue pairs; none is destroyed while mu is held.
struct Seen {
  std::mutex mu;
  std::map<uint32_t, QueuePair> by_number;
  bool watches = false;
};

Seen& seen() {
  static auto* one = new Seen;  // never destroyed: its thread may outlive main
  return *one;
}

template <typename Function>
Function Next(const char* name, const char* version) {
  void* found = dlvsym(RTLD_NEXT, name, version);
  if (found == nullptr) {
    fprintf(stderr, "meddle: no %s\n", name);
    abort();
  }
  return reinterpret_cast<Function>(found);
}

void BreakPlane(const std::string& plane) {
  std::lock_guard<std::mutex> lock(seen().mu);
  for (const auto& entry : seen().by_number) {
    if (entry.second.plane != plane) continue;
    ibv_qp_attr attributes = {};
    attributes.qp_state = IBV_QPS_ERR;
    const int error = ibv_modify_qp(entry.second.qp, &attributes, IBV_QP_STATE);
    fprintf(stderr, "meddle: broke a queue pair of the %s plane: %s\n", plane.c_str(),
            strerror(error));
  }
}

void Watch(const std::string& path) {
  while (true) {
    std::string plane;
    if (std::ifstream(path) >> plane) {
      BreakPlane(plane);
      unlink(path.c_str());
    }
    usleep(5'000);
  }
}

void Remember(const ConnectRequest& request, uint32_t number) {
  std::lock_guard<std::mutex> lock(seen().mu);
  const auto found = seen().by_number.find(number);
  if (found == seen().by_number.end()) return;  // the queue pair failed meanwhile
  found->second.plane = request.is_data_plane ? "data" : "control";
  const char* path = getenv("MEDDLE_BREAK");
  if (path == nullptr || seen().watches) return;
  seen().watches = true;
  std::thread(Watch, std::string(path)).detach();
}

// State of MEDDLE_FLIP.
struct Flips {
  std::mutex mu;
  size_t requests = 0;
  std::set<rdma_cm_id*> answers;  // whether this greeting is to be damaged
};

Flips& flips() {
  static auto* one = new Flips;
  return *one;
}

constexpr size_t kFlipEvery = 3;
constexpr size_t kFlipStep = 5;  // distance of flipped bytes
// Bytes of an answer that may be damaged; zeros follow.
constexpr size_t kAnswerBytes = 64;

void Flip(char* data, size_t bytes, size_t turn, const char* what) {
  const size_t place = turn * kFlipStep % bytes;
  data[place] = static_cast<char>(data[place] ^ (1 << turn % 8));
  fprintf(stderr, "meddle: flipped a bit of byte %zu of %s\n", place, what);
}

// Damages every kFlipEvery-th request to connect.
void DamageRequest(rdma_cm_id* id, std::string* data) {
  std::lock_guard<std::mutex> lock(flips().mu);
  const size_t number = flips().requests++;
  if (number % kFlipEvery != 0) return;
  const size_t turn = number / kFlipEvery;
  if (turn % 2 == 0) return Flip(data->data(), data->size(), turn, "a request");
  flips().answers.insert(id);
}

int (*next_post_send)(ibv_qp*, ibv_send_wr*, ibv_send_wr**);

// A frame stays in the sender's memory until it is sent.
int PostSend(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** bad) {
  if (request->num_sge == 0) return next_post_send(qp, request, bad);
  char* frame = reinterpret_cast<char*>(request->sg_list->addr);
  ps::rdma::FrameHeader header;
  if (request->opcode == IBV_WR_SEND && header.Decode(frame, request->sg_list->length) &&
      header.type == ps::rdma::kRts && header.values > 0) {
    if (const char* claim = getenv("MEDDLE_CLAIM")) {
      std::string size;
      ps::ByteWriter(&size).Int<uint64_t>(std::stoull(claim));
      memcpy(frame + ps::rdma::kFrameHeaderBytes, size.data(), size.size());
    }
    if (getenv("MEDDLE_TAKE") != nullptr) {
      header.has_offer = false;
      header.takes_offer = true;
      const std::string changed = header.Encode();
      memcpy(frame, changed.data(), changed.size());
    }
  }
  return next_post_send(qp, request, bad);
}

}  // namespace

extern "C" ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  static const auto next = Next<decltype(&ibv_create_qp)>("ibv_create_qp", "IBVERBS_1.1");
  ibv_qp* made = next(pd, init);
  if (made != nullptr) {
    std::lock_guard<std::mutex> lock(seen().mu);
    seen().by_number[made->qp_num] = {made, ""};
    auto& post_send = made->context->ops.post_send;
    const bool lies = getenv("MEDDLE_CLAIM") != nullptr || getenv("MEDDLE_TAKE") != nullptr;
    if (lies && post_send != PostSend) {
      next_post_send = post_send;
      post_send = PostSend;
    }
  }
  return made;
}

extern "C" int ibv_destroy_qp(ibv_qp* qp) {
  static const auto next = Next<decltype(&ibv_destroy_qp)>("ibv_destroy_qp", "IBVERBS_1.1");
  std::lock_guard<std::mutex> lock(seen().mu);
  // Erase first: the number may be reused as soon as the queue pair is gone.
  seen().by_number.erase(qp->qp_num);
  return next(qp);
}

extern "C" int rdma_connect(rdma_cm_id* id, rdma_conn_param* parameters) {
  static const auto next = Next<decltype(&rdma_connect)>("rdma_connect", "RDMACM_1.0");
  ConnectRequest request;
  if (!request.Decode(static_cast<const char*>(parameters->private_data),
                      parameters->private_data_len)) {
    return next(id, parameters);
  }
  Remember(request, parameters->qp_num);
  const char* job = getenv("MEDDLE_JOB");
  const char* rank = getenv("MEDDLE_RANK");
  const bool to_server = request.job != 0;
  if (to_server && job != nullptr) request.job = std::stoull(job);
  if (to_server && rank != nullptr) request.rank = std::stoi(rank);
  std::string data = request.Encode();
  if (const char* version = getenv("MEDDLE_VERSION")) data[4] = static_cast<char>(atoi(version));
  if (request.resumes && getenv("MEDDLE_FLIP") != nullptr) DamageRequest(id, &data);
  rdma_conn_param changed = *parameters;
  changed.private_data = data.data();
  changed.private_data_len = static_cast<uint8_t>(data.size());
  return next(id, &changed);
}

extern "C" int rdma_get_cm_event(rdma_event_channel* channel, rdma_cm_event** event) {
  static const auto next = Next<decltype(&rdma_get_cm_event)>("rdma_get_cm_event", "RDMACM_1.0");
  const int result = next(channel, event);
  if (result != 0) return result;
  const rdma_cm_event& got = **event;
  const bool answer =
      got.event == RDMA_CM_EVENT_REJECTED || got.event == RDMA_CM_EVENT_CONNECT_RESPONSE;
  const rdma_conn_param& said = got.param.conn;
  if (!answer || said.private_data_len < kAnswerBytes) return result;
  std::lock_guard<std::mutex> lock(flips().mu);
  if (flips().answers.erase(got.id) == 0) return result;
  // The library's own memory, which may be changed.
  Flip(static_cast<char*>(const_cast<void*>(said.private_data)), kAnswerBytes,
       flips().requests / kFlipEvery, "an answer");
  return result;
}
