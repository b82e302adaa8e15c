// Numbers and texts in messages: fixed width, little-endian, with all lengths checked.
#ifndef BYTEPS_BASE_WIRE_H_
#define BYTEPS_BASE_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
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

// Reads a message from an untrusted sender. A read past the end returns zero, and makes ok() false.
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

  // Reads an element count. Returns 0 if fewer than count × `each` bytes are left.
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

namespace ps {

// Appends fields with fixed width, little-endian on every CPU.
class ByteWriter {
 public:
  // Borrows `out`.
  explicit ByteWriter(std::string* out) : out_(out) {}

  template <typename T>
  void Int(T value) {
    static_assert(std::is_integral<T>::value, "integers only");
    auto bits = static_cast<typename std::make_unsigned<T>::type>(value);
    for (size_t i = 0; i < sizeof(T); ++i) {
      out_->push_back(static_cast<char>(static_cast<uint64_t>(bits) >> (8 * i) & 0xff));
    }
  }

  void Bytes(const std::string& bytes) { out_->append(bytes); }
  void Bytes(const void* data, size_t size) { out_->append(static_cast<const char*>(data), size); }

 private:
  std::string* const out_;
};

// Reads fields that ByteWriter has written. A read returns whether enough bytes were left. After a
// failed read, all further reads fail.
class ByteReader {
 public:
  ByteReader(const char* data, size_t size) : data_(data), left_(size) {}

  template <typename T>
  bool Int(T* value) {
    static_assert(std::is_integral<T>::value, "integers only");
    const char* at = Take(sizeof(T));
    if (at == nullptr) return false;
    uint64_t bits = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      bits |= static_cast<uint64_t>(static_cast<unsigned char>(at[i])) << (8 * i);
    }
    *value = static_cast<T>(static_cast<typename std::make_unsigned<T>::type>(bits));
    return true;
  }

  bool Bytes(size_t size, std::string* bytes) {
    const char* at = Take(size);
    if (at == nullptr) return false;
    bytes->assign(at, size);
    return true;
  }

  size_t left() const { return left_; }

 private:
  const char* Take(size_t size) {
    if (size > left_) {
      left_ = 0;
      failed_ = true;
    }
    if (failed_) return nullptr;
    const char* at = data_;
    data_ += size;
    left_ -= size;
    return at;
  }

  const char* data_;
  size_t left_;
  bool failed_ = false;
};

}  // namespace ps

#endif  // BYTEPS_BASE_WIRE_H_
