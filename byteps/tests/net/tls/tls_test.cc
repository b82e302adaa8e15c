// Tests of encrypted connections, over socket pairs.
#include "byteps/net/tls/tls.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "byteps/base/invariant.h"
#if __has_include(<openssl/ssl.h>)
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

namespace ps {
namespace tls {
namespace {

#if __has_include(<openssl/ssl.h>)
#define X(result, name, arguments) \
  static_assert(std::is_same_v<decltype(&::name), decltype(OpenSsl::name)>, #name);
PS_OPENSSL_SSL_FUNCTIONS(X)
PS_OPENSSL_CRYPTO_FUNCTIONS(X)
#undef X
static_assert(kControlMode == SSL_CTRL_MODE && kControlReadAhead == SSL_CTRL_SET_READ_AHEAD);
static_assert(kControlSessionCache == SSL_CTRL_SET_SESS_CACHE_MODE && SSL_SESS_CACHE_OFF == 0);
static_assert(kControlLeastVersion == SSL_CTRL_SET_MIN_PROTO_VERSION && kTls13 == TLS1_3_VERSION);
static_assert(kModeAcceptMovingBuffer == SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
static_assert(kModeReleaseBuffers == SSL_MODE_RELEASE_BUFFERS && kPem == SSL_FILETYPE_PEM);
static_assert(kVerifyPeer == SSL_VERIFY_PEER && kVerifyUnknown == X509_V_ERR_UNSPECIFIED);
static_assert(kFailIfNoPeerCertificate == SSL_VERIFY_FAIL_IF_NO_PEER_CERT);
static_assert(kErrorWantRead == SSL_ERROR_WANT_READ && kErrorZeroReturn == SSL_ERROR_ZERO_RETURN);
static_assert(kKeyUpdateNotRequested == SSL_KEY_UPDATE_NOT_REQUESTED);
static_assert(kSourceSink == BIO_TYPE_SOURCE_SINK && kControlFlush == BIO_CTRL_FLUSH);
static_assert(kFlagRead == BIO_FLAGS_READ && kFlagShouldRetry == BIO_FLAGS_SHOULD_RETRY);
static_assert(kFlagsRetry == (BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY));
static_assert(kLibrarySsl == ERR_LIB_SSL && kReasonBinder == SSL_R_BINDER_DOES_NOT_VERIFY);
static_assert(kReasonAlert == SSL_AD_REASON_OFFSET);
#endif

constexpr char kSecret[] = "0123456789abcdef";

std::shared_ptr<Context> NewContext(const std::string& secret) {
  return std::make_shared<Context>(auth::Secret(secret), Files());
}

// Returns bytes that differ by position.
std::string Pattern(size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 31 + i / 251);
  return text;
}

// Two ends of a connection, and a relay between them.
class Wire {
 public:
  Wire(const std::string& secret, const std::string& other)
      : connecting_(NewContext(secret)), listening_(NewContext(other)) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, left_), 0);
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, right_), 0);
    connects = std::make_unique<Session>(connecting_.get(), left_[0], true);
    listens = std::make_unique<Session>(listening_.get(), right_[0], false);
  }
  ~Wire() {
    for (int fd : {left_[0], left_[1], right_[0], right_[1]}) close(fd);
  }

  void SetRecordsPerKey(uint64_t records) {
    connecting_->records_per_key = listening_->records_per_key = records;
  }

  // Relays the bytes sent since the last call in both directions; returns them.
  std::string Carry(size_t change = std::string::npos) {
    std::string all = Move(left_[1], right_[1], &to_right_, change);
    return all + Move(right_[1], left_[1], &to_left_, std::string::npos);
  }
  void SayPlainly(const std::string& text) {
    EXPECT_EQ(write(left_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }

  void ShakeHands() {
    Session::Step left = Session::Step::kMore, right = Session::Step::kMore;
    for (int i = 0; i < 10 && (left != Session::Step::kDone || right != Session::Step::kDone);
         ++i) {
      if (left == Session::Step::kMore) left = connects->Handshake();
      Carry();
      if (right == Session::Step::kMore) right = listens->Handshake();
      Carry();
    }
    ASSERT_EQ(left, Session::Step::kDone);
    ASSERT_EQ(right, Session::Step::kDone);
  }

  // Sends `text` in these parts; returns what arrived.
  std::string Send(Session* from, Session* to, const std::string& text,
                   const std::vector<size_t>& parts) {
    std::string got;
    size_t done = 0;
    for (int i = 0; i < 100000 && got.size() < text.size(); ++i) {
      std::vector<iovec> vector;
      size_t at = done;
      for (size_t part = 0; at < text.size() && part < parts.size(); ++part) {
        const size_t bytes = std::min(parts[part], text.size() - at);
        vector.push_back({const_cast<char*>(text.data()) + at, bytes});
        at += bytes;
      }
      if (!vector.empty()) {
        const ssize_t n = from->Write(vector.data(), static_cast<int>(vector.size()));
        if (n < 0 && errno != EAGAIN) return "error " + std::to_string(errno);
        done += std::max<ssize_t>(n, 0);
      }
      Carry();
      char place[3000], rest[100000];
      const iovec here[] = {{place, sizeof(place)}, {rest, sizeof(rest)}};
      for (ssize_t n; (n = to->Read(here, 2)) > 0;) {
        got.append(place, std::min<size_t>(n, sizeof(place)));
        if (n > static_cast<ssize_t>(sizeof(place))) got.append(rest, n - sizeof(place));
      }
    }
    return got;
  }
  std::unique_ptr<Session> connects, listens;

 private:
  // Moves bytes from one end to the other, and returns them. The next call sends what does not fit.
  static std::string Move(int from, int to, std::string* rest, size_t change) {
    std::string all;
    char some[65536];
    for (ssize_t n; (n = recv(from, some, sizeof(some), 0)) > 0;) all.append(some, n);
    if (change < all.size()) all[change] ^= 1;
    rest->append(all);
    const ssize_t n = rest->empty() ? 0 : send(to, rest->data(), rest->size(), 0);
    if (n > 0) rest->erase(0, n);
    return all;
  }

  std::shared_ptr<Context> connecting_, listening_;
  int left_[2], right_[2];
  std::string to_left_, to_right_;
};

TEST(Tls, BothEndsKnowTheSameAndNobodyElse) {
  Wire one(kSecret, kSecret), another(kSecret, kSecret);
  one.ShakeHands();
  another.ShakeHands();
  EXPECT_EQ(one.connects->binding().size(), 32u);
  EXPECT_EQ(one.connects->binding(), one.listens->binding());
  EXPECT_NE(one.connects->binding(), another.connects->binding());
}

TEST(Tls, WhatIsSentComes) {
  Wire wire(kSecret, kSecret);
  wire.ShakeHands();
  const std::string text = Pattern(3 << 20);
  for (const auto& parts : std::vector<std::vector<size_t>>{
           {1 << 20}, {1}, {100, 16384, 1, 40000}, {16383, 2}, {300, 200000, 300, 300}}) {
    const std::string some = text.substr(0, parts[0] == 1 ? 1000 : text.size());
    EXPECT_TRUE(wire.Send(wire.connects.get(), wire.listens.get(), some, parts) == some);
    EXPECT_TRUE(wire.Send(wire.listens.get(), wire.connects.get(), some, parts) == some);
  }
}

// Partial writes lose or duplicate nothing.
TEST(Tls, ASocketThatIsFull) {
  Wire wire(kSecret, kSecret);
  wire.ShakeHands();
  const std::string text = Pattern(2 << 20);
  std::string got;
  std::vector<char> place(1 << 20);
  const iovec here = {place.data(), place.size()};
  size_t done = 0;
  bool full = false;
  for (int i = 0; i < 10000 && got.size() < text.size(); ++i) {
    ssize_t n = 0;
    while (done < text.size() && n >= 0) {
      const iovec rest = {const_cast<char*>(text.data()) + done, text.size() - done};
      n = wire.connects->Write(&rest, 1);
      done += std::max<ssize_t>(n, 0);
    }
    if (n < 0) {
      ASSERT_EQ(errno, EAGAIN);
      full = true;
    }
    wire.Carry();
    while ((n = wire.listens->Read(&here, 1)) > 0) got.append(place.data(), n);
  }
  EXPECT_TRUE(full);
  EXPECT_TRUE(got == text);
}

TEST(Tls, NothingIsReadableInBetween) {
  Wire wire(kSecret, kSecret);
  wire.ShakeHands();
  const std::string text(1000, 'x');
  const iovec whole = {const_cast<char*>(text.data()), text.size()};
  ASSERT_EQ(wire.connects->Write(&whole, 1), 1000);
  const std::string heard = wire.Carry();
  EXPECT_GT(heard.size(), text.size());
  EXPECT_EQ(heard.find("xxxx"), std::string::npos);
}

TEST(Tls, AKeyIsChangedInTime) {
  Wire seldom(kSecret, kSecret), often(kSecret, kSecret);
  often.SetRecordsPerKey(2);
  const std::string text = Pattern(100000);
  size_t heard[2];
  Wire* wires[] = {&seldom, &often};
  for (int i = 0; i < 2; ++i) {
    wires[i]->ShakeHands();
    EXPECT_TRUE(wires[i]->Send(wires[i]->listens.get(), wires[i]->connects.get(), text, {10000}) ==
                text);
    // A part of 10,000 bytes fits in a record.
    std::string small(1, 'x');
    const iovec whole = {small.data(), 1};
    heard[i] = 0;
    for (int n = 0; n < 4; ++n) {
      ASSERT_EQ(wires[i]->connects->Write(&whole, 1), 1);
      heard[i] += wires[i]->Carry().size();
    }
    char place[10];
    const iovec here = {place, sizeof(place)};
    EXPECT_EQ(wires[i]->listens->Read(&here, 1), 4);
  }
  EXPECT_GT(heard[1], heard[0]);  // new keys were announced
}

std::string ErrorOf(Session* session) {
  try {
    for (int i = 0; i < 3; ++i) (void)session->Handshake();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Tls, AnotherSecretIsRefusedByBoth) {
  Wire wire(kSecret, "another secret, as long");
  EXPECT_EQ(wire.connects->Handshake(), Session::Step::kMore);
  wire.Carry();
  EXPECT_NE(ErrorOf(wire.listens.get()).find("different job secrets"), std::string::npos);
  wire.Carry();
  EXPECT_NE(ErrorOf(wire.connects.get()).find("different job secrets"), std::string::npos);
}

TEST(Tls, WhatWasChangedIsNotBelieved) {
  Wire wire(kSecret, kSecret);
  wire.ShakeHands();
  const std::string text(1000, 'x');
  const iovec whole = {const_cast<char*>(text.data()), text.size()};
  ASSERT_EQ(wire.connects->Write(&whole, 1), 1000);
  wire.Carry(500);
  char place[1000];
  const iovec here = {place, sizeof(place)};
  EXPECT_EQ(wire.listens->Read(&here, 1), -1);
  EXPECT_EQ(errno, EPROTO);
  EXPECT_NE(wire.listens->failure(), "");
}

TEST(Tls, WhoDoesNotEncryptIsKnown) {
  Wire wire(kSecret, kSecret);
  EXPECT_EQ(wire.connects->Handshake(), Session::Step::kMore);
  wire.SayPlainly("MBPS");
  EXPECT_EQ(wire.connects->Handshake(), Session::Step::kPlain);
}

}  // namespace
}  // namespace tls
}  // namespace ps
