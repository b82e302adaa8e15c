#ifndef BYTEPS_NET_TCP_SETTINGS_H_
#define BYTEPS_NET_TCP_SETTINGS_H_

#include <cstddef>
#include <memory>

#include "byteps/net/auth/secret.h"
#include "byteps/net/tls/tls.h"

namespace ps {
namespace tcp {

// The TCP van's settings.
struct Settings {
  int io_threads = 0;             // BYTEPS_IO_THREADS; 0: a part of the cores
  int connections = 0;            // BYTEPS_CONNECTIONS with each server; 0: as the link wants
  size_t receive_pool_bytes = 0;  // BYTEPS_RECEIVE_POOL_BYTES
  auth::Secret secret;
  std::shared_ptr<const tls::Context> tls;  // null: nothing is encrypted
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_SETTINGS_H_
