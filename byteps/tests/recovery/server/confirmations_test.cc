#include "byteps/recovery/server/confirmations.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace byteps {
namespace core {
namespace {

TEST(Confirmations, ASumIsWithAllOnceTheyConfirmIt) {
  Confirmations confirmations;
  EXPECT_EQ(confirmations.FirstOpen(), 1U);
  std::optional<Confirmations::Hold> first(confirmations.Begin()), second(confirmations.Begin());
  for (const int rank : {0, 1}) {
    confirmations.Answered(rank, 10, first->serial());
    confirmations.Answered(rank, 11, second->serial());
  }
  second.reset();
  for (const int rank : {0, 1}) confirmations.Confirm(rank, 12);
  EXPECT_EQ(confirmations.FirstOpen(), 1U) << "a member has not asked for it yet";
  confirmations.Answered(2, 7, first->serial());
  first.reset();
  EXPECT_EQ(confirmations.FirstOpen(), 1U);
  confirmations.Confirm(2, 7);
  EXPECT_EQ(confirmations.FirstOpen(), 1U);
  confirmations.Confirm(2, 8);
  EXPECT_EQ(confirmations.FirstOpen(), 3U);
}

TEST(Confirmations, OneThatIsConfirmedLaterDoesNotGoBefore) {
  Confirmations confirmations;
  {
    confirmations.Answered(0, 2, confirmations.Begin().serial());
  }
  EXPECT_EQ(confirmations.FirstOpen(), 1U) << "it was not confirmed";
  Confirmations::Hold hold = confirmations.Begin();
  confirmations.Answered(0, 3, hold.serial());
  hold = Confirmations::Hold();
  confirmations.Confirm(0, 3);
  EXPECT_EQ(confirmations.FirstOpen(), 2U);
}

TEST(Confirmations, WhoIsGoneOrAbsentIsNotWaitedFor) {
  Confirmations confirmations;
  {
    const Confirmations::Hold hold = confirmations.Begin();
    for (const int rank : {0, 1, 2}) confirmations.Answered(rank, 1, hold.serial());
  }
  confirmations.SetGone(0);
  confirmations.SetAbsent({1});
  EXPECT_EQ(confirmations.FirstOpen(), 1U);
  confirmations.SetAbsent({1, 2});
  EXPECT_EQ(confirmations.FirstOpen(), 2U);
  {
    const Confirmations::Hold hold = confirmations.Begin();
    for (const int rank : {0, 1}) confirmations.Answered(rank, 1, hold.serial());
  }
  EXPECT_EQ(confirmations.FirstOpen(), 3U);
  confirmations.SetAbsent({});
  {
    const Confirmations::Hold hold = confirmations.Begin();
    confirmations.Answered(1, 1, hold.serial());
  }
  EXPECT_EQ(confirmations.FirstOpen(), 3U) << "it is there again";
}

}  // namespace
}  // namespace core
}  // namespace byteps
