#include "byteps/net/tls/openssl_api.h"

#include <dlfcn.h>

#include <string>

#include "byteps/base/error.h"

namespace ps {
namespace tls {
namespace {

constexpr char kSsl[] = "libssl.so.3";
constexpr char kCrypto[] = "libcrypto.so.3";
// Of OPENSSL_init_ssl: threads of ours may still run when the process exits.
constexpr uint64_t kNoAtExit = 0x00080000;

struct Loaded {
  OpenSsl api;
  std::string error;  // empty: `api` is whole
};

void* Open(const char* library, std::string* error) {
  // Never closed: it has state for each thread.
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr && error->empty()) {
    const char* reason = dlerror();
    *error = std::string("BYTEPS_TLS=1 needs OpenSSL 3, which cannot be loaded: ") +
             (reason != nullptr ? reason : library) + " (Debian: libssl3, RHEL: openssl-libs)";
  }
  return handle;
}

Loaded Load() {
  Loaded loaded;
  void* ssl = Open(kSsl, &loaded.error);
  void* crypto = Open(kCrypto, &loaded.error);
  if (!loaded.error.empty()) return loaded;
  const auto find = [&](void* library, auto* function, const char* symbol) {
    void* address = dlsym(library, symbol);
    if (address == nullptr && loaded.error.empty()) {
      loaded.error = std::string("BYTEPS_TLS=1: this machine's OpenSSL has no ") + symbol +
                     "; install OpenSSL 3.0 or later";
    }
    *reinterpret_cast<void**>(function) = address;
  };
#define X(result, name, arguments) find(ssl, &loaded.api.name, #name);
  PS_OPENSSL_SSL_FUNCTIONS(X)
#undef X
#define X(result, name, arguments) find(crypto, &loaded.api.name, #name);
  PS_OPENSSL_CRYPTO_FUNCTIONS(X)
#undef X
  if (loaded.error.empty() && loaded.api.OPENSSL_init_ssl(kNoAtExit, nullptr) != 1) {
    loaded.error = "BYTEPS_TLS=1: OpenSSL cannot be initialized; look at its openssl.cnf";
  }
  return loaded;
}

}  // namespace

const OpenSsl& LoadOpenSsl() {
  // Never destroyed, like the library.
  static const Loaded* const loaded = new Loaded(Load());
  if (!loaded->error.empty()) throw Error(loaded->error);
  return loaded->api;
}

}  // namespace tls
}  // namespace ps
