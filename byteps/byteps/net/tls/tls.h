// Encrypted connections: TLS 1.3 by OpenSSL.
//
// Nodes authenticate by a pre-shared key, which is derived from the job's secret. Or they have
// certificates; then they prove the secret as well, if the job has one. A proof of the secret
// covers Session::binding(), so it is valid for no other TLS connection.
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

// Functions of OpenSSL 3 that encrypt connections. They are loaded at run time.
//
// So builds do not depend on OpenSSL, and BYTEPS_TLS uses the library that the distribution
// maintains.

// Opaque types of OpenSSL.
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

// Constants of OpenSSL's binary interface.
constexpr int kControlMode = 33;  // a command of SSL_CTX_ctrl, as are the next three
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
constexpr int kErrorWantRead = 2;   // a result of SSL_get_error, as is the next constant
constexpr int kErrorZeroReturn = 6;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kSourceSink = 0x0400;  // a type for BIO_meth_new
constexpr int kControlFlush = 11;
constexpr int kFlagRead = 1;
constexpr int kFlagShouldRetry = 8;
constexpr int kFlagsRetry = 15;
constexpr int kLibrarySsl = 20;  // the part of an error code that names libssl
constexpr int kReasonBinder = 253;
constexpr int kReasonAlert = 1000;  // plus the number of the received alert
constexpr int kAlerts = 256;

using UseSession = int (*)(ssl_st*, const evp_md_st*, const unsigned char**, size_t*,
                           ssl_session_st**);
using FindSession = int (*)(ssl_st*, const unsigned char*, size_t, ssl_session_st**);

// Functions that are used, as X(result, name, parameters). tests/engine/tls_test.cc compares them
// with OpenSSL's header.
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

// Pointers to the functions. None is null.
struct OpenSsl {
#define X(result, name, arguments) result(*name) arguments = nullptr;
  PS_OPENSSL_SSL_FUNCTIONS(X)
  PS_OPENSSL_CRYPTO_FUNCTIONS(X)
#undef X
};

// Loads libssl.so.3 and libcrypto.so.3, once per process. Throws Error that says what is missing. A
// failure is final. Thread-safe.
const OpenSsl& LoadOpenSsl();

// Advice to the user if one node encrypts and another does not.
extern const char kAdvice[];

struct Files {
  std::string certificate;  // this node's certificate and its chain up to the authority; PEM
  std::string key;
  std::string authority;  // signs the nodes' certificates
};

// Settings of encryption.
struct TlsSettings {
  bool encrypts = false;  // BYTEPS_TLS
  Files files;            // BYTEPS_TLS_CERT, BYTEPS_TLS_KEY and BYTEPS_TLS_CA; each may be empty
};

// Encryption settings that a process's connections share.
class Context {
 public:
  // Returns null if encryption is off. Throws Error that says what to set, or what is wrong with a
  // file.
  static std::shared_ptr<const Context> Make(const TlsSettings& settings,
                                             const auth::Secret& secret);

  // Uses certificates if `files` names them, otherwise the secret. Throws Error.
  Context(const auth::Secret& secret, const Files& files);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  bool has_certificates() const { return has_certificates_; }

  // Number of records after which a session changes its key. AES-GCM is safe for 2^24.5 records
  // (RFC 8446, 5.5).
  uint64_t records_per_key = 1 << 23;

 private:
  friend class Session;

  static int UseKey(ssl_st* ssl, const evp_md_st* hash, const unsigned char** identity,
                    size_t* bytes, ssl_session_st** session);
  static int FindKey(ssl_st* ssl, const unsigned char* identity, size_t bytes,
                     ssl_session_st** session);
  // Returns the pre-shared key as OpenSSL's type, or null if memory is short.
  ssl_session_st* NewKey(ssl_st* ssl) const;
  // Throws OpenSSL's last error about this file.
  [[noreturn]] void ThrowOf(const char* variable, const std::string& path) const;
  void LoadFiles(const Files& files);

  const OpenSsl& api_;
  ssl_ctx_st* context_ = nullptr;
  bool has_certificates_ = false;
  std::string key_;  // the pre-shared key; empty if nodes have certificates
};

// An encrypted connection over a non-blocking socket. One thread may read while another writes.
class Session {
 public:
  enum class Step {
    kDone,
    kMore,    // call again when the socket is readable
    kClosed,  // the peer closed or reset the connection
    kPlain,   // the peer does not encrypt; nothing was read
  };

  // `context` must outlive this object. The caller owns `fd`, and keeps it open.
  Session(const Context* context, int fd, bool connects);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Continues the handshake. Call before reading or writing. If the peer's handshake is wrong,
  // sends the peer a TLS alert, then throws Error.
  Step Handshake();

  // Read and Write behave like readv and sendmsg with MSG_DONTWAIT. After EPROTO, failure() returns
  // the reason. After EAGAIN, the next Write must get the same bytes again.
  ssize_t Read(const iovec* vector, int count);
  ssize_t Write(const iovec* vector, int count);
  std::string failure();

  // Bytes that only the two ends of this connection know.
  const std::string& binding() const { return binding_; }

 private:
  // Returns the socket as OpenSSL's BIO. OpenSSL calls OnRead and OnWrite inside its own functions,
  // so mu_ is held. Clang cannot see that.
  static const bio_method_st* Method();
  static int OnRead(bio_st* bio, char* data, int bytes) PS_NO_THREAD_SAFETY_ANALYSIS;
  static int OnWrite(bio_st* bio, const char* data, int bytes) PS_NO_THREAD_SAFETY_ANALYSIS;
  static long OnControl(bio_st* bio, int command, long number, void* pointer);

  // Receives from the socket. Returns -1 if there is nothing to receive, or after an error
  // (error_).
  ssize_t Receive(char* data, size_t bytes, int flags) PS_REQUIRES(mu_);
  void Bind() PS_REQUIRES(mu_);
  // Sends encrypted bytes. If some are left, returns false and sets errno.
  bool Flush() PS_REQUIRES(mu_);
  // Encrypts the first of these bytes. Returns how many it has encrypted; 0 on failure.
  size_t Encrypt(const iovec* vector, int count) PS_REQUIRES(mu_);
  // Explains OpenSSL's last error.
  std::string Explain() PS_REQUIRES(mu_);
  // Sets errno for OpenSSL's `result`. Returns the result for Read.
  ssize_t Fail(int result) PS_REQUIRES(mu_);

  const Context* const shared_;
  const OpenSsl& api_;
  const int fd_;
  const bool connects_;

  // OpenSSL allows one thread at a time.
  Mutex mu_;
  ssl_st* ssl_ PS_PT_GUARDED_BY(mu_) = nullptr;
  bool known_ PS_GUARDED_BY(mu_) = false;  // whether the peer's first byte was seen
  bool plain_ PS_GUARDED_BY(mu_) = false;  // whether the peer does not use TLS
  bool ended_ PS_GUARDED_BY(mu_) = false;  // whether the peer has closed the connection
  int error_ PS_GUARDED_BY(mu_) = 0;       // errno of the socket
  std::string failure_ PS_GUARDED_BY(mu_);
  std::string binding_;
  // Encrypted bytes that are not sent yet, and how many of the caller's bytes they contain.
  std::vector<char> out_ PS_GUARDED_BY(mu_);
  size_t sent_ PS_GUARDED_BY(mu_) = 0;
  size_t accepted_ PS_GUARDED_BY(mu_) = 0;
  uint64_t records_ PS_GUARDED_BY(mu_) = 0;  // number of records sent with the current key
};

}  // namespace tls
}  // namespace ps

#endif  // BYTEPS_NET_TLS_TLS_H_
