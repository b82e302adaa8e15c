// The job's secret, and proofs of it.
//
// A proof is an HMAC-SHA256 over the greetings of both sides. Each greeting contains a random
// number, so an overheard proof is valid for no other connection.
#ifndef BYTEPS_NET_AUTH_SECRET_H_
#define BYTEPS_NET_AUTH_SECRET_H_

#include <cstddef>
#include <string>

namespace ps {
namespace auth {

constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;
// Least number of bytes of a secret. A shorter one could be guessed from an overheard proof.
constexpr size_t kLeastSecretBytes = 16;

// Returns random bytes from the kernel.
std::string NewNonce(size_t bytes = kNonceBytes);

// Returns a secret for a new job, as text.
std::string NewSecret();

// Settings of the secret.
struct SecretSettings {
  bool authenticates = true;  // BYTEPS_AUTH
  std::string secret;         // BYTEPS_SECRET
  std::string file;           // BYTEPS_SECRET_FILE
};

class Secret {
 public:
  // Makes the secret of a job without authentication. Its proofs are checksums that anyone can
  // make.
  Secret() = default;
  // `bytes`: at least kLeastSecretBytes.
  explicit Secret(const std::string& bytes);

  // Reads the secret from the settings, or from the file that they name. Throws Error that says
  // what to set.
  static Secret Read(const SecretSettings& settings);

  bool is_there() const { return !key_.empty(); }

  // Returns kProofBytes bytes derived from the secret for `purpose`. They differ from all proofs.
  // Requires a secret.
  std::string Derive(const std::string& purpose) const;

  // Returns the kProofBytes bytes by which `who` proves that it has the secret, for the greeting
  // `said`.
  std::string Prove(const std::string& who, const std::string& said) const;
  // Checks `proof` against the first `bytes` of Prove's result, in constant time.
  bool Proves(const char* proof, const std::string& who, const std::string& said,
              size_t bytes = kProofBytes) const;

 private:
  std::string key_;
};

// Advice to the user if two nodes have different secrets.
inline constexpr char kAdvice[] =
    "give all nodes the same BYTEPS_SECRET_FILE or BYTEPS_SECRET (or BYTEPS_AUTH=0)";

}  // namespace auth
}  // namespace ps
#endif  // BYTEPS_NET_AUTH_SECRET_H_
