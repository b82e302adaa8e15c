#ifndef BYTEPS_NET_TCP_READ_BUFFER_H_
#define BYTEPS_NET_TCP_READ_BUFFER_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <vector>

namespace ps {
namespace tcp {

// Reads frames from a socket: what follows a message's meta straight to where it belongs; a few KiB
// that came along with the meta are copied there.
//
// Bytes that have come and were not looked at yet.
class ReadBuffer {
 public:
  // Read at once in addition to a value: several small messages, or the next one's meta and little
  // of its values, which has to be copied.
  static constexpr size_t kBytes = 16384;

  ReadBuffer() : bytes_(kBytes) {}

  size_t size() const { return end_ - begin_; }
  const char* data() const { return bytes_.data() + begin_; }

  // These many, or null: they are not there yet, and the next reads have room for them.
  const char* Peek(size_t bytes);
  void Skip(size_t bytes) { begin_ += bytes; }
  void Clear() { begin_ = end_ = 0; }
  // Gives back what a long meta took, if it can.
  void Shrink();

  // Where the next bytes are read to, and that so many were.
  iovec Room();
  void Add(size_t bytes);

 private:
  void Need(size_t bytes);

  std::vector<char> bytes_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_READ_BUFFER_H_
