// Encrypted connections: TLS 1.3, by OpenSSL.
//
// Who may speak is decided by the job's secret, from which both ends make the same pre-shared
// key; or by certificates, and then by the secret as well, if there is one.  What a proof of the
// secret is over includes Session::binding(), so that it is worth nothing on another channel.
#ifndef BYTEPS_NET_TLS_TLS_H_
#define BYTEPS_NET_TLS_TLS_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/auth/secret.h"
#include "byteps/net/tls/openssl_api.h"

namespace ps {
namespace tls {

// What to do where one node encrypts and another does not.
extern const char kAdvice[];

struct Files {
  std::string certificate;  // this node's, and what it was signed with up to the authority; PEM
  std::string key;
  std::string authority;  // who signs the certificates of nodes
};

// What the connections of a process share.
class Context {
 public:
  // From BYTEPS_TLS and BYTEPS_TLS_*; null: nothing is encrypted.  Throws Error that says
  // what to set.
  static std::shared_ptr<const Context> FromEnvironment(const auth::Secret& secret);

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
