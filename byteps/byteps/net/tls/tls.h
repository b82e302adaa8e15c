// Encrypted connections: TLS 1.3, by OpenSSL.
//
// Who may speak is decided by the job's secret, from which both ends make the same pre-shared
// key; or by certificates, and then by the secret as well, if there is one.  What a proof of the
// secret is over includes Session::binding(), so that it is worth nothing on another channel.
#ifndef BYTEPS_NET_TLS_TLS_H_
#define BYTEPS_NET_TLS_TLS_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/auth/secret.h"

// The part of OpenSSL 3 that encrypts connections, found at run time.
//
// So nothing that is built needs OpenSSL, whatever it is built for; who asks for BYTEPS_TLS uses
// the library that the machine's distribution keeps up to date.

// OpenSSL's own names for what only it looks into.
struct bio_method_st;
struct bio_st;
struct evp_md_st;
struct ossl_init_settings_st;
struct ssl_cipher_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct ssl_session_st;
struct ssl_st;
struct x509_store_ctx_st;

namespace ps {
namespace tls {

// Values that are part of OpenSSL's binary interface.
constexpr int kControlMode = 33;  // of SSL_CTX_ctrl, like the next three
constexpr int kControlReadAhead = 41;
constexpr int kControlSessionCache = 44;
constexpr int kControlLeastVersion = 123;
constexpr long kModeAcceptMovingBuffer = 2;
constexpr long kModeReleaseBuffers = 16;
constexpr int kTls13 = 0x0304;
constexpr int kPem = 1;
constexpr int kVerifyPeer = 1;
constexpr int kFailIfNoPeerCertificate = 2;
constexpr long kVerifyUnknown = 1;  // nothing was verified
constexpr int kErrorWantRead = 2;   // of SSL_get_error, like the next
constexpr int kErrorZeroReturn = 6;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kSourceSink = 0x0400;  // of BIO_meth_new
constexpr int kControlFlush = 11;
constexpr int kFlagRead = 1;
constexpr int kFlagShouldRetry = 8;
constexpr int kFlagsRetry = 15;
constexpr int kLibrarySsl = 20;  // in an error's number
constexpr int kReasonBinder = 253;
constexpr int kReasonAlert = 1000;  // plus the alert that came
constexpr int kAlerts = 256;

using UseSession = int (*)(ssl_st*, const evp_md_st*, const unsigned char**, size_t*,
                           ssl_session_st**);
using FindSession = int (*)(ssl_st*, const unsigned char*, size_t, ssl_session_st**);

// X(what it returns, its name, what it takes).  tests/engine/tls_test.cc compares each with the
// library's header.
#define PS_OPENSSL_SSL_FUNCTIONS(X)                                                            \
  X(int, OPENSSL_init_ssl, (uint64_t, const ossl_init_settings_st*))                           \
  X(const ssl_method_st*, TLS_method, ())                                                      \
  X(ssl_ctx_st*, SSL_CTX_new, (const ssl_method_st*))                                          \
  X(void, SSL_CTX_free, (ssl_ctx_st*))                                                         \
  X(long, SSL_CTX_ctrl, (ssl_ctx_st*, int, long, void*))                                       \
  X(int, SSL_CTX_set_ciphersuites, (ssl_ctx_st*, const char*))                                 \
  X(int, SSL_CTX_set_num_tickets, (ssl_ctx_st*, size_t))                                       \
  X(void, SSL_CTX_set_default_read_buffer_len, (ssl_ctx_st*, size_t))                          \
  X(int, SSL_set_session_id_context, (ssl_st*, const unsigned char*, unsigned))                \
  X(void, SSL_CTX_set_verify, (ssl_ctx_st*, int, int (*)(int, x509_store_ctx_st*)))            \
  X(void, SSL_CTX_set_default_passwd_cb, (ssl_ctx_st*, int (*)(char*, int, int, void*)))       \
  X(int, SSL_CTX_use_certificate_chain_file, (ssl_ctx_st*, const char*))                       \
  X(int, SSL_CTX_use_PrivateKey_file, (ssl_ctx_st*, const char*, int))                         \
  X(int, SSL_CTX_check_private_key, (const ssl_ctx_st*))                                       \
  X(int, SSL_CTX_load_verify_file, (ssl_ctx_st*, const char*))                                 \
  X(void, SSL_CTX_set_psk_use_session_callback, (ssl_ctx_st*, UseSession))                     \
  X(void, SSL_CTX_set_psk_find_session_callback, (ssl_ctx_st*, FindSession))                   \
  X(ssl_st*, SSL_new, (ssl_ctx_st*))                                                           \
  X(void, SSL_free, (ssl_st*))                                                                 \
  X(int, SSL_set_ex_data, (ssl_st*, int, void*))                                               \
  X(void*, SSL_get_ex_data, (const ssl_st*, int))                                              \
  X(void, SSL_set_bio, (ssl_st*, bio_st*, bio_st*))                                            \
  X(void, SSL_set_connect_state, (ssl_st*))                                                    \
  X(void, SSL_set_accept_state, (ssl_st*))                                                     \
  X(int, SSL_do_handshake, (ssl_st*))                                                          \
  X(int, SSL_read, (ssl_st*, void*, int))                                                      \
  X(int, SSL_write, (ssl_st*, const void*, int))                                               \
  X(int, SSL_get_error, (const ssl_st*, int))                                                  \
  X(int, SSL_session_reused, (const ssl_st*))                                                  \
  X(long, SSL_get_verify_result, (const ssl_st*))                                              \
  X(int, SSL_key_update, (ssl_st*, int))                                                       \
  X(int, SSL_export_keying_material,                                                           \
    (ssl_st*, unsigned char*, size_t, const char*, size_t, const unsigned char*, size_t, int)) \
  X(const ssl_cipher_st*, SSL_CIPHER_find, (ssl_st*, const unsigned char*))                    \
  X(ssl_session_st*, SSL_SESSION_new, ())                                                      \
  X(void, SSL_SESSION_free, (ssl_session_st*))                                                 \
  X(int, SSL_SESSION_set1_master_key, (ssl_session_st*, const unsigned char*, size_t))         \
  X(int, SSL_SESSION_set_cipher, (ssl_session_st*, const ssl_cipher_st*))                      \
  X(int, SSL_SESSION_set_protocol_version, (ssl_session_st*, int))

#define PS_OPENSSL_CRYPTO_FUNCTIONS(X)                                             \
  X(int, BIO_get_new_index, ())                                                    \
  X(bio_method_st*, BIO_meth_new, (int, const char*))                              \
  X(int, BIO_meth_set_read, (bio_method_st*, int (*)(bio_st*, char*, int)))        \
  X(int, BIO_meth_set_write, (bio_method_st*, int (*)(bio_st*, const char*, int))) \
  X(int, BIO_meth_set_ctrl, (bio_method_st*, long (*)(bio_st*, int, long, void*))) \
  X(bio_st*, BIO_new, (const bio_method_st*))                                      \
  X(void, BIO_set_data, (bio_st*, void*))                                          \
  X(void*, BIO_get_data, (bio_st*))                                                \
  X(void, BIO_set_init, (bio_st*, int))                                            \
  X(void, BIO_set_flags, (bio_st*, int))                                           \
  X(void, BIO_clear_flags, (bio_st*, int))                                         \
  X(unsigned long, ERR_get_error, ())                                              \
  X(void, ERR_clear_error, ())                                                     \
  X(const char*, ERR_reason_error_string, (unsigned long))                         \
  X(const char*, X509_verify_cert_error_string, (long))

// Every member is set.
struct OpenSsl {
#define X(result, name, arguments) result(*name) arguments = nullptr;
  PS_OPENSSL_SSL_FUNCTIONS(X)
  PS_OPENSSL_CRYPTO_FUNCTIONS(X)
#undef X
};

// Loads libssl.so.3 and libcrypto.so.3, once for the process.  Thread-safe.  Throws Error
// that says what is missing; a failure is final.
const OpenSsl& LoadOpenSsl();

// What to do where one node encrypts and another does not.
extern const char kAdvice[];

struct Files {
  std::string certificate;  // this node's, and what it was signed with up to the authority; PEM
  std::string key;
  std::string authority;  // who signs the certificates of nodes
};

// Settings of encryption.
struct TlsSettings {
  bool encrypts = false;  // BYTEPS_TLS
  Files files;            // BYTEPS_TLS_CERT, BYTEPS_TLS_KEY and BYTEPS_TLS_CA; empty: none
};

// What the connections of a process share.
class Context {
 public:
  // Null: nothing is encrypted.  Throws Error that says what to set, or what is wrong with a file.
  static std::shared_ptr<const Context> Make(const TlsSettings& settings,
                                             const auth::Secret& secret);

  // With certificates where `files` names them, by the secret otherwise.  Throws Error.
  Context(const auth::Secret& secret, const Files& files);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  bool has_certificates() const { return has_certificates_; }

  // A key is used for so many records.  AES-GCM's is good for 2^24.5 (RFC 8446, 5.5).
  uint64_t records_per_key = 1 << 23;

 private:
  friend class Session;

  static int UseKey(ssl_st* ssl, const evp_md_st* hash, const unsigned char** identity,
                    size_t* bytes, ssl_session_st** session);
  static int FindKey(ssl_st* ssl, const unsigned char* identity, size_t bytes,
                     ssl_session_st** session);
  // The key, as what OpenSSL takes for it; null: it has no memory.
  ssl_session_st* NewKey(ssl_st* ssl) const;
  // Throws what OpenSSL said last of this file.
  [[noreturn]] void ThrowOf(const char* variable, const std::string& path) const;
  void LoadFiles(const Files& files);

  const OpenSsl& api_;
  ssl_ctx_st* context_ = nullptr;
  bool has_certificates_ = false;
  std::string key_;  // empty: has certificates
};

// One encrypted connection over a socket that does not block.  Any thread may write while another
// one reads.
class Session {
 public:
  enum class Step {
    kDone,
    kMore,    // call again when the socket is readable
    kClosed,  // the other end closed the connection, or reset it
    kPlain,   // the other end does not encrypt; nothing was read
  };

  // `context` outlives it; `fd` stays the caller's, and open.
  Session(const Context* context, int fd, bool connects);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // To be done before anything is read or written.  Throws Error that says what is wrong
  // with the other end; that one has been told.
  Step Handshake();

  // As readv and sendmsg with MSG_DONTWAIT do.  EPROTO: failure() says why.  After EAGAIN the next
  // Write is given the same bytes once more.
  ssize_t Read(const iovec* vector, int count);
  ssize_t Write(const iovec* vector, int count);
  std::string failure();

  // Bytes that both ends of this connection know, and nobody else.
  const std::string& binding() const { return binding_; }

 private:
  // A socket, as OpenSSL sees it.  It calls these while one of its functions runs, so with mu_
  // held, which clang cannot see.
  static const bio_method_st* Method();
  static int OnRead(bio_st* bio, char* data, int bytes) PS_NO_THREAD_SAFETY_ANALYSIS;
  static int OnWrite(bio_st* bio, const char* data, int bytes) PS_NO_THREAD_SAFETY_ANALYSIS;
  static long OnControl(bio_st* bio, int command, long number, void* pointer);

  // From the socket: -1 for nothing there, or with error_.
  ssize_t Receive(char* data, size_t bytes, int flags) PS_REQUIRES(mu_);
  void Bind() PS_REQUIRES(mu_);
  // Sends what is encrypted.  False: not all of it; errno says why.
  bool Flush() PS_REQUIRES(mu_);
  // Encrypts the beginning of these.  Returns how much of it, 0 when it failed.
  size_t Encrypt(const iovec* vector, int count) PS_REQUIRES(mu_);
  // What OpenSSL's last error means.
  std::string Explain() PS_REQUIRES(mu_);
  // Sets errno after OpenSSL returned `result`; what Read returns then.
  ssize_t Fail(int result) PS_REQUIRES(mu_);

  const Context* const shared_;
  const OpenSsl& api_;
  const int fd_;
  const bool connects_;

  // OpenSSL takes one thread at a time.
  Mutex mu_;
  ssl_st* ssl_ PS_PT_GUARDED_BY(mu_) = nullptr;
  bool known_ PS_GUARDED_BY(mu_) = false;  // what the other end speaks, by its first byte:
  bool plain_ PS_GUARDED_BY(mu_) = false;  // not TLS
  bool ended_ PS_GUARDED_BY(mu_) = false;  // the other end closed it
  int error_ PS_GUARDED_BY(mu_) = 0;       // an errno of the socket
  std::string failure_ PS_GUARDED_BY(mu_);
  std::string binding_;
  // What is encrypted and not sent yet, and how much of what the caller has it is.
  std::vector<char> out_ PS_GUARDED_BY(mu_);
  size_t sent_ PS_GUARDED_BY(mu_) = 0;
  size_t accepted_ PS_GUARDED_BY(mu_) = 0;
  uint64_t records_ PS_GUARDED_BY(mu_) = 0;  // with this key
};

}  // namespace tls
}  // namespace ps

#endif  // BYTEPS_NET_TLS_TLS_H_
