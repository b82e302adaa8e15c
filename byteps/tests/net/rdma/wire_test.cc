// Tests of the bytes that two endpoints exchange.
#include "byteps/net/rdma/wire.h"

#include <gtest/gtest.h>

#include <string>

#include "byteps/net/auth/secret.h"

namespace ps {
namespace rdma {
namespace {

TEST(RdmaWire, ARefusalSaysWhetherItWillPass) {
  Refusal said, heard;
  said.again_soon = true;
  said.reason = std::string(500, 'x');
  const std::string bytes = said.Encode();
  ASSERT_EQ(bytes.size(), 148u);
  ASSERT_TRUE(heard.Decode(bytes.data(), bytes.size()));
  EXPECT_TRUE(heard.again_soon);
  EXPECT_EQ(heard.reason, std::string(122, 'x'));
  EXPECT_EQ(heard.Claims(), said.Claims());
  const std::string claims = said.Claims();
  said.again_soon = false;
  EXPECT_NE(said.Claims(), claims);
  said.proof = std::string(kAnswerProofBytes, 'p');
  ASSERT_TRUE(heard.Decode(said.Encode().data(), bytes.size()));
  EXPECT_FALSE(heard.again_soon);
  EXPECT_EQ(heard.proof, said.proof);
  EXPECT_EQ(heard.reason, std::string(122, 'x'));
}

TEST(RdmaWire, AFrameHasWhatItsTypeMayHave) {
  const auto passes = [](FrameType type, bool in_region, bool has_offer, bool takes_offer) {
    FrameHeader said, heard;
    said.type = type;
    said.meta_in_region = in_region;
    said.has_offer = has_offer;
    said.takes_offer = takes_offer;
    const std::string bytes = said.Encode();
    return heard.Decode(bytes.data(), bytes.size()) && heard.Encode() == bytes;
  };
  EXPECT_TRUE(passes(kRts, true, false, false));
  EXPECT_TRUE(passes(kRts, false, true, false));
  EXPECT_TRUE(passes(kRts, false, false, true));
  EXPECT_TRUE(passes(kMessage, false, true, false));
  EXPECT_FALSE(passes(kMessage, true, false, false));
  EXPECT_FALSE(passes(kMessage, false, false, true));
  EXPECT_FALSE(passes(kCts, false, true, false));
  EXPECT_FALSE(passes(kRts, true, true, false)) << "whose answer it is has to be known with it";
  EXPECT_FALSE(passes(kRts, true, false, true)) << "its meta has no place there";
  EXPECT_FALSE(passes(kRts, false, true, true)) << "an answer has no answer";
}

TEST(RdmaWire, AnOfferIsOfAValueThatMayCome) {
  Offer said, heard;
  said.target = {0x7f0012345000, 77, 5};
  said.bytes = kMaxValueBytes;
  const std::string bytes = said.Encode();
  ASSERT_EQ(bytes.size(), kOfferBytes);
  ASSERT_TRUE(heard.Decode(bytes.data(), bytes.size()));
  EXPECT_EQ(heard.target.address, said.target.address);
  EXPECT_EQ(heard.target.cookie, 5u);
  EXPECT_EQ(heard.bytes, said.bytes);
  EXPECT_FALSE(heard.Decode(bytes.data(), bytes.size() - 1));
  for (const uint64_t wrong : {uint64_t{0}, kMaxValueBytes + 1}) {
    said.bytes = wrong;
    EXPECT_FALSE(heard.Decode(said.Encode().data(), kOfferBytes)) << wrong;
  }
}

TEST(RdmaWire, AProofIsOverAllThatAnAnswerSays) {
  ConnectReply reply;
  reply.slots = 8;
  const std::string claims = reply.Claims();
  reply.slots = 12;
  EXPECT_NE(reply.Claims(), claims);
  reply.proof = std::string(auth::kProofBytes, 'p');
  EXPECT_EQ(reply.Encode(), reply.Claims() + reply.proof);
  Challenge said, heard;
  said.sender = 5;
  said.nonce = std::string(auth::kNonceBytes, 'n');
  said.proof = std::string(kAnswerProofBytes, 'p');
  ASSERT_TRUE(heard.Decode(said.Encode().data(), said.Encode().size()));
  EXPECT_EQ(heard.Claims(), said.Claims());
  EXPECT_EQ(heard.proof, said.proof);
}

TEST(RdmaWire, ARequestThatResumesIsProvedAsOne) {
  ConnectRequest said, heard;
  said.sender = 7;
  said.slots = 8;
  const std::string first = said.Claims();
  said.resumes = true;
  EXPECT_NE(said.Claims(), first);
  const std::string bytes = said.Encode();
  ASSERT_TRUE(heard.Decode(bytes.data(), bytes.size()));
  EXPECT_TRUE(heard.resumes);
  EXPECT_FALSE(heard.is_data_plane);
}

}  // namespace
}  // namespace rdma
}  // namespace ps
