// The values that go round, of which every byte is known.
#ifndef PS_TESTS_VAN_TEST_VALUES_H_
#define PS_TESTS_VAN_TEST_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace van_test {

// What a server does to every word.
constexpr uint64_t kMark = 0x5a5a5a5a5a5a5a5aull;

// Another value for each seed.
void Fill(char* data, size_t bytes, uint64_t seed);
void Mark(char* data, size_t bytes);
// The place of the first byte that is not as it should be, or -1.
int64_t FirstWrong(const char* data, size_t bytes, uint64_t seed, uint64_t mark = kMark);

// What a worker's values lie in.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() { return bytes_.get(); }

 private:
  std::unique_ptr<char[]> bytes_;
  uint64_t number_ = 0;
};

}  // namespace van_test
#endif  // PS_TESTS_VAN_TEST_VALUES_H_
