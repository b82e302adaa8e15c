// Breaks RDMA from inside a process, for tests; loaded by LD_PRELOAD.
//
//   MEDDLE_VERSION=N    connection requests claim wire version N
//   MEDDLE_BREAK=FILE   once FILE is there, the queue pairs of the plane that its text names
//                       ("data" or "control") fail, as they do when a card gives up on a peer
//
// Only connections that this process asks for are touched.
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
#include <string>
#include <thread>

#include "rdma/wire.h"

namespace {

using ps::rdma::ConnectRequest;

struct Seen {
  std::mutex mu;
  std::map<uint32_t, ibv_qp*> by_number;
  std::multimap<std::string, uint32_t> by_plane;
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
  const auto range = seen().by_plane.equal_range(plane);
  for (auto it = range.first; it != range.second; ++it) {
    ibv_qp_attr attributes = {};
    attributes.qp_state = IBV_QPS_ERR;
    const int error = ibv_modify_qp(seen().by_number[it->second], &attributes, IBV_QP_STATE);
    fprintf(stderr, "meddle: broke a queue pair of the %s plane: %s\n", plane.c_str(),
            strerror(error));
  }
}

void Watch(const std::string& path) {
  while (true) {
    std::string plane;
    if (std::ifstream(path) >> plane) return BreakPlane(plane);
    usleep(20'000);
  }
}

void Remember(const ConnectRequest& request, uint32_t number) {
  std::lock_guard<std::mutex> lock(seen().mu);
  seen().by_plane.emplace(request.isDataPlane ? "data" : "control", number);
  const char* path = getenv("MEDDLE_BREAK");
  if (path == nullptr || seen().watches) return;
  seen().watches = true;
  std::thread(Watch, std::string(path)).detach();
}

}  // namespace

extern "C" ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  static const auto next = Next<decltype(&ibv_create_qp)>("ibv_create_qp", "IBVERBS_1.1");
  ibv_qp* made = next(pd, init);
  if (made != nullptr) {
    std::lock_guard<std::mutex> lock(seen().mu);
    seen().by_number[made->qp_num] = made;
  }
  return made;
}

extern "C" int rdma_connect(rdma_cm_id* id, rdma_conn_param* parameters) {
  static const auto next = Next<decltype(&rdma_connect)>("rdma_connect", "RDMACM_1.0");
  ConnectRequest request;
  if (parameters->private_data_len < sizeof(request)) return next(id, parameters);
  memcpy(&request, parameters->private_data, sizeof(request));
  Remember(request, parameters->qp_num);
  rdma_conn_param changed = *parameters;
  if (const char* version = getenv("MEDDLE_VERSION")) request.version = atoi(version);
  changed.private_data = &request;
  changed.private_data_len = sizeof(request);
  return next(id, &changed);
}
