#include "byteps/net/tls/tls.h"

#include <dlfcn.h>
#include <sodium/utils.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"

namespace ps {
namespace tls {
namespace {

constexpr char kSsl[] = "libssl.so.3";
constexpr char kCrypto[] = "libcrypto.so.3";
// Flag of OPENSSL_init_ssl: threads may still run when the process exits.
constexpr uint64_t kNoAtExit = 0x00080000;

struct Loaded {
  OpenSsl api;
  std::string error;  // "" if `api` is complete
};

void* Open(const char* library, std::string* error) {
  // The library is never closed, because it has per-thread state.
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
  // The functions are never destroyed, like the library.
  static const Loaded* const loaded = new Loaded(Load());
  if (!loaded->error.empty()) throw Error(loaded->error);
  return loaded->api;
}

namespace {

// Alerts of RFC 8446, 6.2.
constexpr int kHandshakeFailure = 40;
constexpr int kBadCertificate = 42;
constexpr int kUnknownAuthority = 48;
constexpr int kCertificateRequired = 116;

// AES instructions make all but the last of these suites fast; the last is fast without them.
constexpr char kSuites[] = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
constexpr char kIdentity[] = "Megatron-BytePS job secret, 1";
constexpr char kKeyPurpose[] = "Megatron-BytePS: TLS 1.3 pre-shared key, 1";
constexpr unsigned char kSessions[] = {1};
constexpr char kBindingLabel[] = "EXPORTER-Megatron-BytePS-proof";
constexpr size_t kBindingBytes = 32;

constexpr size_t kRecordBytes = 16384;
// Limit of bytes that one write call encrypts, and that one read call returns.
constexpr size_t kBatchBytes = 8 * kRecordBytes;
// Bytes read from the socket per call.
constexpr size_t kReadAheadBytes = 4 * kRecordBytes;
// First byte that a peer sends if it uses TLS.
constexpr unsigned char kHandshakeRecord = 22;
constexpr unsigned char kAlertRecord = 21;

int Reason(unsigned long error) { return static_cast<int>(error & 0x7fffff); }
bool IsSsl(unsigned long error) { return ((error >> 23) & 0xff) == kLibrarySsl; }

// Refuses encrypted keys: no user is there to type a password.
int NoPassword(char*, int, int, void*) { return -1; }

}  // namespace

const char kAdvice[] = "set BYTEPS_TLS=1 on every node of the job, or on none";

// ------------------------------------------------------------------ context

std::shared_ptr<const Context> Context::Make(const TlsSettings& settings,
                                             const auth::Secret& secret) {
  const Files& files = settings.files;
  const bool any = !files.certificate.empty() || !files.key.empty() || !files.authority.empty();
  const bool all = !files.certificate.empty() && !files.key.empty() && !files.authority.empty();
  if (!settings.encrypts) {
    if (any) {
      throw Error(
          "BYTEPS_TLS_CERT, BYTEPS_TLS_KEY or BYTEPS_TLS_CA is set, and BYTEPS_TLS=0: nothing "
          "would "
          "be encrypted; set BYTEPS_TLS=1, or unset them");
    }
    return nullptr;
  }
  if (any && !all) {
    throw Error(
        "BYTEPS_TLS_CERT, BYTEPS_TLS_KEY and BYTEPS_TLS_CA go together: set all of them, or none "
        "to "
        "encrypt by the job's secret");
  }
  if (!any && !secret.is_there()) {
    throw Error(
        "BYTEPS_TLS=1 needs the job's secret, or BYTEPS_TLS_CERT, BYTEPS_TLS_KEY and "
        "BYTEPS_TLS_CA: with BYTEPS_AUTH=0 and no certificates anybody could stand in between");
  }
  return std::make_shared<const Context>(secret, files);
}

Context::Context(const auth::Secret& secret, const Files& files) : api_(LoadOpenSsl()) {
  api_.ERR_clear_error();
  context_ = api_.SSL_CTX_new(api_.TLS_method());
  if (context_ == nullptr) throw Error("SSL_CTX_new failed");
  api_.SSL_CTX_ctrl(context_, kControlLeastVersion, kTls13, nullptr);
  api_.SSL_CTX_ctrl(context_, kControlMode, kModeAcceptMovingBuffer | kModeReleaseBuffers, nullptr);
  // Without resumption each connection authenticates anew.
  api_.SSL_CTX_ctrl(context_, kControlSessionCache, 0, nullptr);
  api_.SSL_CTX_set_num_tickets(context_, 0);
  api_.SSL_CTX_ctrl(context_, kControlReadAhead, 1, nullptr);
  api_.SSL_CTX_set_default_read_buffer_len(context_, kReadAheadBytes);
  if (api_.SSL_CTX_set_ciphersuites(context_, kSuites) != 1) {
    api_.SSL_CTX_free(context_);
    throw Error("BYTEPS_TLS=1: this machine's OpenSSL knows none of " + std::string(kSuites));
  }
  // With a pre-shared key neither end has a certificate, and neither accepts one.
  api_.SSL_CTX_set_verify(context_, kVerifyPeer | kFailIfNoPeerCertificate, nullptr);
  has_certificates_ = !files.certificate.empty();
  if (has_certificates_) {
    try {
      LoadFiles(files);
    } catch (const Error&) {
      api_.SSL_CTX_free(context_);
      throw;
    }
  } else {
    key_ = secret.Derive(kKeyPurpose);
    api_.SSL_CTX_set_psk_use_session_callback(context_, UseKey);
    api_.SSL_CTX_set_psk_find_session_callback(context_, FindKey);
  }
}

Context::~Context() {
  api_.SSL_CTX_free(context_);
  if (!key_.empty()) sodium_memzero(key_.data(), key_.size());
}

void Context::LoadFiles(const Files& files) {
  api_.SSL_CTX_set_default_passwd_cb(context_, NoPassword);
  if (api_.SSL_CTX_use_certificate_chain_file(context_, files.certificate.c_str()) != 1) {
    ThrowOf("BYTEPS_TLS_CERT", files.certificate);
  }
  if (api_.SSL_CTX_use_PrivateKey_file(context_, files.key.c_str(), kPem) != 1 ||
      api_.SSL_CTX_check_private_key(context_) != 1) {
    ThrowOf("BYTEPS_TLS_KEY", files.key);
  }
  if (api_.SSL_CTX_load_verify_file(context_, files.authority.c_str()) != 1) {
    ThrowOf("BYTEPS_TLS_CA", files.authority);
  }
}

void Context::ThrowOf(const char* variable, const std::string& path) const {
  // The first error is the cause, e.g. a missing file.
  const unsigned long error = api_.ERR_get_error();
  const bool system = (error & 0x80000000ul) != 0;
  const char* text =
      system ? strerror(static_cast<int>(error & 0x7fffffff)) : api_.ERR_reason_error_string(error);
  throw Error(std::string(variable) + "=" + path +
              " cannot be used: " + (text != nullptr ? text : "unknown error") +
              " (it must be a PEM file, and a key without a password)");
}

ssl_session_st* Context::NewKey(ssl_st* ssl) const {
  ssl_session_st* session = api_.SSL_SESSION_new();
  if (session == nullptr) return nullptr;
  const auto* key = reinterpret_cast<const unsigned char*>(key_.data());
  // The cipher determines the key's hash.
  if (api_.SSL_SESSION_set1_master_key(session, key, key_.size()) == 1 &&
      api_.SSL_SESSION_set_cipher(session, api_.SSL_CIPHER_find(ssl, kAes128GcmSha256)) == 1 &&
      api_.SSL_SESSION_set_protocol_version(session, kTls13) == 1) {
    return session;
  }
  api_.SSL_SESSION_free(session);
  return nullptr;
}

int Context::UseKey(ssl_st* ssl, const evp_md_st* /*hash*/, const unsigned char** identity,
                    size_t* bytes, ssl_session_st** session) {
  const OpenSsl& api = LoadOpenSsl();
  const auto* self = static_cast<const Context*>(api.SSL_get_ex_data(ssl, 0));
  *identity = reinterpret_cast<const unsigned char*>(kIdentity);
  *bytes = strlen(kIdentity);
  *session = self->NewKey(ssl);
  return *session != nullptr;
}

int Context::FindKey(ssl_st* ssl, const unsigned char* identity, size_t bytes,
                     ssl_session_st** session) {
  const OpenSsl& api = LoadOpenSsl();
  const auto* self = static_cast<const Context*>(api.SSL_get_ex_data(ssl, 0));
  *session = nullptr;
  if (bytes != strlen(kIdentity) || memcmp(identity, kIdentity, bytes) != 0) return 1;
  *session = self->NewKey(ssl);
  return *session != nullptr;
}

// ------------------------------------------------------------------ session

const bio_method_st* Session::Method() {
  static const bio_method_st* const method = [] {
    const OpenSsl& api = LoadOpenSsl();
    bio_method_st* made =
        api.BIO_meth_new(api.BIO_get_new_index() | kSourceSink, "Megatron-BytePS socket");
    if (made == nullptr) throw Error("OpenSSL has no memory");
    api.BIO_meth_set_read(made, OnRead);
    api.BIO_meth_set_write(made, OnWrite);
    api.BIO_meth_set_ctrl(made, OnControl);
    return made;
  }();
  return method;
}

Session::Session(const Context* context, int fd, bool connects)
    : shared_(context), api_(context->api_), fd_(fd), connects_(connects) {
  ssl_ = api_.SSL_new(context->context_);
  bio_st* bio = api_.BIO_new(Method());
  if (ssl_ == nullptr || bio == nullptr) throw Error("OpenSSL has no memory");
  api_.BIO_set_data(bio, this);
  api_.BIO_set_init(bio, 1);
  api_.SSL_set_bio(ssl_, bio, bio);
  api_.SSL_set_ex_data(ssl_, 0, const_cast<Context*>(context));
  // OpenSSL requires this of a listener that accepts pre-shared keys and could verify certificates.
  if (!connects) api_.SSL_set_session_id_context(ssl_, kSessions, sizeof(kSessions));
  connects ? api_.SSL_set_connect_state(ssl_) : api_.SSL_set_accept_state(ssl_);
}

Session::~Session() { api_.SSL_free(ssl_); }

int Session::OnRead(bio_st* bio, char* data, int bytes) {
  const OpenSsl& api = LoadOpenSsl();
  auto* self = static_cast<Session*>(api.BIO_get_data(bio));
  api.BIO_clear_flags(bio, kFlagsRetry);
  if (self->plain_ || self->error_ != 0) return -1;
  if (self->ended_) return 0;
  // The first byte shows whether the peer speaks TLS. It is only peeked at.
  ssize_t n = self->known_ ? 1 : self->Receive(data, 1, MSG_PEEK);
  if (n == 1 && !self->known_) {
    const auto first = static_cast<unsigned char>(*data);
    self->known_ = true;
    self->plain_ = first != kHandshakeRecord && first != kAlertRecord;
    if (self->plain_) return -1;
  }
  if (n == 1) n = self->Receive(data, bytes, 0);
  if (n < 0 && self->error_ == 0) api.BIO_set_flags(bio, kFlagRead | kFlagShouldRetry);
  return static_cast<int>(n);
}

ssize_t Session::Receive(char* data, size_t bytes, int flags) {
  ssize_t n = 0;
  do {
    n = recv(fd_, data, bytes, flags | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  ended_ = n == 0;
  if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) error_ = errno;
  return n;
}

int Session::OnWrite(bio_st* bio, const char* data, int bytes) {
  auto* self = static_cast<Session*>(LoadOpenSsl().BIO_get_data(bio));
  self->out_.insert(self->out_.end(), data, data + bytes);
  return bytes;
}

long Session::OnControl(bio_st* /*bio*/, int command, long /*number*/, void* /*pointer*/) {
  return command == kControlFlush ? 1 : 0;
}

bool Session::Flush() {
  while (sent_ < out_.size()) {
    const ssize_t n =
        send(fd_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    sent_ += n;
  }
  out_.clear();
  sent_ = 0;
  return true;
}

Session::Step Session::Handshake() {
  MutexLock lock(&mu_);
  api_.ERR_clear_error();
  const int result = api_.SSL_do_handshake(ssl_);
  const int error = result == 1 ? 0 : api_.SSL_get_error(ssl_, result);
  if (plain_) return Step::kPlain;
  std::string failure = error == 0 || error == kErrorWantRead ? "" : Explain();
  // This flush also sends alerts. The kernel has room for a whole handshake.
  (void)Flush();
  if (error == kErrorWantRead) return Step::kMore;
  if (ended_ || error_ != 0) return Step::kClosed;
  if (error != 0) throw Error(failure);
  Bind();
  return Step::kDone;
}

void Session::Bind() {
  // This should be impossible, because both ends accept only the pre-shared key.
  if (!shared_->has_certificates() && api_.SSL_session_reused(ssl_) != 1) {
    throw Error("the TLS handshake did not use the job's secret");
  }
  binding_.resize(kBindingBytes);
  auto* bytes = reinterpret_cast<unsigned char*>(binding_.data());
  if (api_.SSL_export_keying_material(ssl_, bytes, kBindingBytes, kBindingLabel,
                                      strlen(kBindingLabel), nullptr, 0, 0) != 1) {
    throw Error("SSL_export_keying_material failed");
  }
}

ssize_t Session::Read(const iovec* vector, int count) {
  size_t got = 0;
  for (int i = 0; i < count && got < kBatchBytes; ++i) {
    char* data = static_cast<char*>(vector[i].iov_base);
    for (size_t done = 0; done < vector[i].iov_len && got < kBatchBytes;) {
      const size_t wanted = std::min(vector[i].iov_len - done, kBatchBytes);
      MutexLock lock(&mu_);
      api_.ERR_clear_error();
      const int n = api_.SSL_read(ssl_, data + done, static_cast<int>(wanted));
      // The next call finds the error again.
      if (n <= 0) return got > 0 ? static_cast<ssize_t>(got) : Fail(n);
      done += n;
      got += n;
    }
  }
  return static_cast<ssize_t>(got);
}

ssize_t Session::Fail(int result) {
  const int error = api_.SSL_get_error(ssl_, result);
  if (error == kErrorWantRead) {
    errno = EAGAIN;
    return -1;
  }
  if (error == kErrorZeroReturn || ended_) return 0;
  if (error_ != 0) {
    errno = error_;
    return -1;
  }
  if (failure_.empty()) failure_ = Explain();
  (void)Flush();  // Flush sends the alert
  errno = EPROTO;
  return -1;
}

size_t Session::Encrypt(const iovec* vector, int count) {
  std::array<char, kRecordBytes> gathered;
  size_t accepted = 0;
  size_t done = 0;  // bytes of vector[i] that are sent
  for (int i = 0; i < count && accepted < kBatchBytes;) {
    const char* data = static_cast<const char*>(vector[i].iov_base) + done;
    size_t bytes = std::min(vector[i].iov_len - done, kBatchBytes - accepted);
    if (bytes < kRecordBytes && i + 1 < count) {
      // Small parts are encrypted together in one record.
      bytes = 0;
      while (i < count && bytes < kRecordBytes) {
        const size_t part = std::min(vector[i].iov_len - done, kRecordBytes - bytes);
        memcpy(gathered.data() + bytes, static_cast<const char*>(vector[i].iov_base) + done, part);
        bytes += part;
        done += part;
        if (done == vector[i].iov_len) done = 0, ++i;
      }
      data = gathered.data();
    } else {
      done += bytes;
      if (done == vector[i].iov_len) done = 0, ++i;
    }
    if (bytes == 0) continue;
    if (records_ >= shared_->records_per_key) {
      api_.SSL_key_update(ssl_, kKeyUpdateNotRequested);
      records_ = 0;
    }
    records_ += (bytes + kRecordBytes - 1) / kRecordBytes;
    if (api_.SSL_write(ssl_, data, static_cast<int>(bytes)) != static_cast<int>(bytes)) return 0;
    accepted += bytes;
  }
  return accepted;
}

ssize_t Session::Write(const iovec* vector, int count) {
  MutexLock lock(&mu_);
  if (!Flush()) return -1;
  if (accepted_ == 0) {
    api_.ERR_clear_error();
    accepted_ = Encrypt(vector, count);
    if (accepted_ == 0) {
      if (failure_.empty()) failure_ = Explain();
      errno = EPROTO;
      return -1;
    }
    if (!Flush()) return -1;
  }
  return static_cast<ssize_t>(std::exchange(accepted_, 0));
}

std::string Session::failure() {
  MutexLock lock(&mu_);
  return failure_;
}

std::string Session::Explain() {
  const unsigned long error = api_.ERR_get_error();
  const char* text = api_.ERR_reason_error_string(error);
  const std::string reason = text != nullptr ? text : "unknown error";
  const int alert = IsSsl(error) ? Reason(error) - kReasonAlert : -1;
  const bool is_alert = alert >= 0 && alert < kAlerts;
  const long verified = api_.SSL_get_verify_result(ssl_);
  if (!shared_->has_certificates()) {
    if (is_alert || (IsSsl(error) && Reason(error) == kReasonBinder)) {
      return std::string("the two nodes have different job secrets, or one has none for TLS (") +
             reason + "): " + auth::kAdvice;
    }
    if (verified > kVerifyUnknown) {
      return "it has a certificate (BYTEPS_TLS_CERT), and this node goes by the job's secret: give "
             "every node of the job the same BYTEPS_TLS_* settings";
    }
  } else {
    if (verified != 0) {
      return std::string("its certificate is not accepted: ") +
             api_.X509_verify_cert_error_string(verified) +
             ": BYTEPS_TLS_CA must have signed the certificates of all nodes";
    }
    if (is_alert && ((alert >= kBadCertificate && alert <= kUnknownAuthority) ||
                     alert == kCertificateRequired)) {
      return "it does not accept this node's certificate (" + reason +
             "): its BYTEPS_TLS_CA must have signed BYTEPS_TLS_CERT";
    }
    if (is_alert && alert == kHandshakeFailure) {
      return "it has no certificate (BYTEPS_TLS_CERT), and this node demands one: give every node "
             "of the job the same BYTEPS_TLS_* settings";
    }
  }
  return "its encryption failed: " + reason;
}

}  // namespace tls
}  // namespace ps
