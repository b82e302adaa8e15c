# Defines the target Sodium, which authentication needs.
if(NOT BYTEPS_SODIUM_SOURCE)
  find_path(SODIUM_INCLUDE_DIR sodium.h)
  find_library(SODIUM_LIBRARY sodium)
  if(NOT SODIUM_INCLUDE_DIR OR NOT SODIUM_LIBRARY)
    message(FATAL_ERROR "libsodium is missing: install libsodium-dev, or give its sources by "
                        "BYTEPS_SODIUM_SOURCE")
  endif()
  add_library(Sodium INTERFACE)
  target_include_directories(Sodium SYSTEM INTERFACE ${SODIUM_INCLUDE_DIR})
  target_link_libraries(Sodium INTERFACE ${SODIUM_LIBRARY})
  return()
endif()

# Compile libsodium from source into our objects: released binaries must run where it is not
# installed. Its own build is not used, since it needs a shell and an archiver for the target. No
# instruction set is selected: a proof takes microseconds anyway.
enable_language(C)
file(GLOB sodium_root ${BYTEPS_SODIUM_SOURCE}/libsodium-*/)
set(sodium_src ${sodium_root}/src/libsodium)
if(NOT EXISTS ${sodium_src}/crypto_auth/hmacsha256/auth_hmacsha256.c)
  message(FATAL_ERROR "BYTEPS_SODIUM_SOURCE=${BYTEPS_SODIUM_SOURCE} must hold one folder "
                      "libsodium-VERSION")
endif()
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" VERSION ${sodium_root})
set(SODIUM_LIBRARY_VERSION_MAJOR 0)
set(SODIUM_LIBRARY_VERSION_MINOR 0)
configure_file(${sodium_src}/include/sodium/version.h.in
               ${CMAKE_CURRENT_BINARY_DIR}/sodium-include/sodium/version.h @ONLY)
file(GLOB_RECURSE sodium_sources ${sodium_src}/*.c)
add_library(Sodium STATIC ${sodium_sources})
target_include_directories(Sodium SYSTEM
  PUBLIC ${sodium_src}/include ${CMAKE_CURRENT_BINARY_DIR}/sodium-include
  PRIVATE ${sodium_src}/include/sodium ${CMAKE_CURRENT_BINARY_DIR}/sodium-include/sodium)
target_compile_definitions(Sodium PUBLIC SODIUM_STATIC=1
  PRIVATE CONFIGURED=1 NATIVE_LITTLE_ENDIAN=1 HAVE_SYS_RANDOM_H=1 HAVE_GETRANDOM=1)
target_compile_options(Sodium PRIVATE -w)
