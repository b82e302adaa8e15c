#include "values.h"

#include <algorithm>
#include <cstring>

#include "byteps/net/link/registration_cache.h"
#include "options.h"

namespace van_test {
namespace {

// Differs by sender, receiver, message and place.  By words: an emulated CPU is slow.
uint64_t WordAt(uint64_t seed, size_t place) {
  return (seed * 0x9e3779b97f4a7c15ull + place) * 0xd6e8feb86659fd93ull;
}

// Calls work(place, bytes) for each word, and for what is left behind the last.
template <typename Work>
void ForWords(size_t bytes, Work work) {
  for (size_t at = 0; at < bytes; at += 8) work(at, std::min<size_t>(8, bytes - at));
}

}  // namespace

void Fill(char* data, size_t bytes, uint64_t seed) {
  ForWords(bytes, [&](size_t at, size_t n) {
    const uint64_t word = WordAt(seed, at);
    memcpy(data + at, &word, n);
  });
}

void Mark(char* data, size_t bytes) {
  ForWords(bytes, [&](size_t at, size_t n) {
    uint64_t word = 0;
    memcpy(&word, data + at, n);
    word ^= kMark;
    memcpy(data + at, &word, n);
  });
}

int64_t FirstWrong(const char* data, size_t bytes, uint64_t seed, uint64_t mark) {
  int64_t wrong = -1;
  ForWords(bytes, [&](size_t at, size_t n) {
    const uint64_t word = WordAt(seed, at) ^ mark;
    if (wrong < 0 && memcmp(data + at, &word, n) != 0) wrong = static_cast<int64_t>(at);
  });
  return wrong;
}

Memory::Memory(size_t bytes) : bytes_(new char[bytes]) {
  if (options.places == "cached") number_ = ps::RegistrationCache::Add(bytes_.get(), bytes);
}

Memory::~Memory() { ps::RegistrationCache::Remove(number_); }

}  // namespace van_test
