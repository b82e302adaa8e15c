// Where values go that nobody wants.
#ifndef BYTEPS_NET_LINK_NOWHERE_H_
#define BYTEPS_NET_LINK_NOWHERE_H_

namespace ps {

// What a place_for handler answers when it refuses values: a TCP transport takes no memory for
// them, and reads and drops them.  Their message comes with one empty value, and with the bytes
// that it had as meta.data_size.  A message whose values found no memory comes likewise.
inline char* Nowhere() {
  static char nowhere;
  return &nowhere;
}

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NOWHERE_H_
