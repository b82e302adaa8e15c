// Fields as they lie on the wire: fixed widths, little endian, whatever the CPU.
#ifndef BYTEPS_BASE_WIRE_BYTES_H_
#define BYTEPS_BASE_WIRE_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace ps {

class ByteWriter {
 public:
  // Appends to `out`, which is borrowed.
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

// Every read says whether the bytes were there; after one that were not, all fail.
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
#endif  // BYTEPS_BASE_WIRE_BYTES_H_
