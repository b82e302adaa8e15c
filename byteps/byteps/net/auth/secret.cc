#include "byteps/net/auth/secret.h"

#include <sodium/crypto_auth_hmacsha256.h>
#include <sodium/utils.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"

namespace ps {
namespace auth {
namespace {

static_assert(kProofBytes == crypto_auth_hmacsha256_BYTES, "the proof is an HMAC-SHA256");

// Purpose that the derived key is bound to: the key is useless for any other (domain separation).
constexpr char kPurpose[] = "Megatron-BytePS: authentication of connections, 1";

std::string Hmac(const std::string& key, const std::string& first, const std::string& second) {
  crypto_auth_hmacsha256_state state;
  const auto bytes = [](const std::string& s) {
    return reinterpret_cast<const unsigned char*>(s.data());
  };
  crypto_auth_hmacsha256_init(&state, bytes(key), key.size());
  crypto_auth_hmacsha256_update(&state, bytes(first), first.size());
  crypto_auth_hmacsha256_update(&state, bytes(second), second.size());
  std::string mac(kProofBytes, '\0');
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(mac.data()));
  return mac;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file.is_open() || file.bad()) {
    throw Error("BYTEPS_SECRET_FILE=" + path + " cannot be read: " + strerror(errno));
  }
  struct stat about;
  if (stat(path.c_str(), &about) == 0 && (about.st_mode & S_IROTH) != 0) {
    BPS_LOG(WARNING) << "every user of this host can read BYTEPS_SECRET_FILE=" << path
                     << ": chmod o-r " << path;
  }
  return text.str();
}

}  // namespace

std::string NewNonce(size_t bytes) {
  std::string nonce(bytes, '\0');
  if (getrandom(nonce.data(), bytes, 0) != static_cast<ssize_t>(bytes)) ThrowErrno("getrandom");
  return nonce;
}

std::string NewSecret() {
  std::string bytes = NewNonce();
  std::string text(2 * bytes.size() + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), reinterpret_cast<const unsigned char*>(bytes.data()),
                 bytes.size());
  sodium_memzero(bytes.data(), bytes.size());
  text.pop_back();
  return text;
}

Secret::Secret(const std::string& bytes) : key_(Hmac(bytes, kPurpose, "")) {}

Secret Secret::Read(const SecretSettings& settings) {
  const std::string& given = settings.secret;
  const std::string& path = settings.file;
  if (!settings.authenticates) return Secret();
  if (!given.empty() && !path.empty()) {
    throw Error("BYTEPS_SECRET and BYTEPS_SECRET_FILE are both set; unset one of them");
  }
  if (given.empty() && path.empty()) {
    throw Error(
        "this job has no secret, so that anybody could speak to it: make one by `byteps-server "
        "--new-secret FILE`, give it to every node and set BYTEPS_SECRET_FILE (or BYTEPS_SECRET); "
        "BYTEPS_AUTH=0 goes without");
  }
  std::string bytes = path.empty() ? given : ReadFile(path);
  // Strips white space that an editor or shell has appended.
  bytes.erase(bytes.find_last_not_of(" \t\r\n") + 1);
  if (bytes.size() < kLeastSecretBytes) {
    throw Error((path.empty() ? "BYTEPS_SECRET" : "the secret in BYTEPS_SECRET_FILE=" + path) +
                std::string(" has ") + std::to_string(bytes.size()) + " bytes and needs " +
                std::to_string(kLeastSecretBytes) +
                ": make one by `byteps-server --new-secret FILE`");
  }
  Secret secret(bytes);
  sodium_memzero(bytes.data(), bytes.size());
  return secret;
}

std::string Secret::Derive(const std::string& purpose) const { return Hmac(key_, purpose, ""); }

std::string Secret::Prove(const std::string& who, const std::string& said) const {
  return Hmac(key_, who + '\0', said);
}

bool Secret::Proves(const char* proof, const std::string& who, const std::string& said,
                    size_t bytes) const {
  return sodium_memcmp(proof, Prove(who, said).data(), bytes) == 0;
}

}  // namespace auth
}  // namespace ps
