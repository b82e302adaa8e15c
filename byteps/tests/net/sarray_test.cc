// Upstream's arrays share their memory when they are copied, and hand it over when they are moved.
#include "ps/sarray.h"

#include <gtest/gtest.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace byteps {
namespace core {
namespace {

using Array = ps::SArray<char>;

// Otherwise a vector of arrays copies them when it grows.
static_assert(std::is_nothrow_move_constructible_v<Array>);
static_assert(std::is_nothrow_move_assignable_v<Array>);

void ExpectEmpty(const Array& array) {
  EXPECT_EQ(array.data(), nullptr);
  EXPECT_EQ(array.size(), 0u);
  EXPECT_EQ(array.capacity(), 0u);
  EXPECT_EQ(array.ptr().use_count(), 0);
}

TEST(SArray, CopyShares) {
  const Array source(100, 'a');
  const Array copy = source;  // NOLINT: a copy is what is tested
  EXPECT_EQ(copy.data(), source.data());
  EXPECT_EQ(copy.size(), 100u);
  EXPECT_EQ(source.ptr().use_count(), 2);
}

TEST(SArray, MoveHandsOver) {
  Array source(100, 'a');
  const char* const memory = source.data();
  Array target = std::move(source);
  EXPECT_EQ(target.data(), memory);
  EXPECT_EQ(target.size(), 100u);
  EXPECT_EQ(target.capacity(), 100u);
  EXPECT_EQ(target.ptr().use_count(), 1);
  ExpectEmpty(source);  // NOLINT: what is left is what is tested
}

TEST(SArray, MoveIntoAnotherFreesItsMemory) {
  Array target(10, 'b');
  const std::weak_ptr<char> before = target.ptr();
  Array source(100, 'a');
  const char* const memory = source.data();
  target = std::move(source);
  EXPECT_TRUE(before.expired());
  EXPECT_EQ(target.data(), memory);
  EXPECT_EQ(target.ptr().use_count(), 1);
  ExpectEmpty(source);  // NOLINT: what is left is what is tested
}

TEST(SArray, MoveIntoItselfChangesNothing) {
  Array array(100, 'a');
  const char* const memory = array.data();
  Array* const itself = &array;
  array = std::move(*itself);
  EXPECT_EQ(array.data(), memory);
  EXPECT_EQ(array.size(), 100u);
  EXPECT_EQ(array.ptr().use_count(), 1);
}

TEST(SArray, GrowingVectorCountsNoReferences) {
  std::vector<Array> arrays;
  arrays.emplace_back(100, 'a');
  const std::weak_ptr<char> memory = arrays.front().ptr();
  arrays.reserve(arrays.capacity() + 100);
  EXPECT_EQ(memory.use_count(), 1);
}

TEST(SArray, MovedFromCanBeUsedAgain) {
  Array source(100, 'a');
  const Array target = std::move(source);
  source.resize(5, 'c');  // NOLINT
  EXPECT_EQ(source.size(), 5u);
  EXPECT_EQ(source[4], 'c');
  EXPECT_EQ(target[4], 'a');
}

}  // namespace
}  // namespace core
}  // namespace byteps
