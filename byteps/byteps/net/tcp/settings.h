#ifndef BYTEPS_NET_TCP_SETTINGS_H_
#define BYTEPS_NET_TCP_SETTINGS_H_

#include <cstddef>
#include <memory>

#include "byteps/net/auth/secret.h"
#include "byteps/net/tls/tls.h"

namespace ps {
namespace tcp {

// Settings of the TCP van.
struct Settings {
  int io_threads = 0;             // BYTEPS_IO_THREADS; 0: computed from the number of cores
  int connections = 0;            // BYTEPS_CONNECTIONS to each server; 0: as many as the link needs
  size_t receive_pool_bytes = 0;  // BYTEPS_RECEIVE_POOL_BYTES
  auth::Secret secret;
  std::shared_ptr<const tls::Context> tls;  // null: no encryption
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_SETTINGS_H_
