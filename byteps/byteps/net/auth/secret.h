// What the nodes of a job have and nobody else, and how they show it without saying it.
//
// Who proves that it has the secret sends an HMAC-SHA256 over what both sides have said, which
// has a random number of each: nothing that was heard before is of use to anybody.
#ifndef BYTEPS_NET_AUTH_SECRET_H_
#define BYTEPS_NET_AUTH_SECRET_H_

#include <cstddef>
#include <string>

namespace ps {
namespace auth {

constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;
// A guess at a shorter one could be tried against a proof that was heard.
constexpr size_t kLeastSecretBytes = 16;

// Random bytes from the kernel.
std::string NewNonce(size_t bytes = kNonceBytes);

// A secret for a new job, as text.
std::string NewSecret();

// Settings of the secret.
struct SecretSettings {
  bool authenticates = true;  // BYTEPS_AUTH
  std::string secret;         // BYTEPS_SECRET
  std::string file;           // BYTEPS_SECRET_FILE
};

class Secret {
 public:
  // None: the job goes without authentication.  A proof is a checksum then, which anybody can make.
  Secret() = default;
  // `bytes` has at least kLeastSecretBytes.
  explicit Secret(const std::string& bytes);

  // The secret that the settings give, or name a file of.  Throws Error that says what to set.
  static Secret Read(const SecretSettings& settings);

  bool is_there() const { return !key_.empty(); }

  // kProofBytes for another use than proofs; each `purpose` has its own.  The secret is there.
  std::string Derive(const std::string& purpose) const;

  // kProofBytes for the end that speaks as `who` after `said` was said.
  std::string Prove(const std::string& who, const std::string& said) const;
  // Whether `proof` begins with the first `bytes` of that.  Takes the same time for every proof.
  bool Proves(const char* proof, const std::string& who, const std::string& said,
              size_t bytes = kProofBytes) const;

 private:
  std::string key_;
};

// What to do where two nodes have not the same secret.
inline constexpr char kAdvice[] =
    "give all nodes the same BYTEPS_SECRET_FILE or BYTEPS_SECRET (or BYTEPS_AUTH=0)";

}  // namespace auth
}  // namespace ps
#endif  // BYTEPS_NET_AUTH_SECRET_H_
