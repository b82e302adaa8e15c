// Numbers and texts in messages: fixed width, little-endian, every length checked.
#ifndef BYTEPS_BASE_WIRE_H_
#define BYTEPS_BASE_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace byteps {
namespace core {

// Builds a message.
class WireWriter {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_unsigned<T>::value, "fixed-width unsigned numbers only");
    for (size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void PutSize(size_t size) { Put(static_cast<uint32_t>(size)); }
  void PutText(const std::string& text) {
    PutSize(text.size());
    out_ += text;
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads one, from any sender.  Reads past the end are zero, and make ok() false.
class WireReader {
 public:
  explicit WireReader(const std::string& in) : in_(in) {}

  template <typename T>
  T Get() {
    if (!Has(sizeof(T))) return 0;
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(in_[at_++])) << (8 * i);
    }
    return static_cast<T>(value);
  }

  // A count of things that take at least `each` bytes; 0 when so many cannot follow.
  uint32_t GetCount(size_t each) {
    const uint32_t count = Get<uint32_t>();
    return Has(static_cast<uint64_t>(count) * each) ? count : 0;
  }

  std::string GetText() {
    const uint32_t size = GetCount(1);
    at_ += size;
    return in_.substr(at_ - size, size);
  }

  bool ok() const { return ok_; }
  bool at_end() const { return at_ == in_.size(); }

 private:
  bool Has(uint64_t bytes) {
    ok_ = ok_ && bytes <= in_.size() - at_;
    return ok_;
  }

  const std::string& in_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_WIRE_H_
